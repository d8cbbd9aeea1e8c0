"""Sign-in through another provider of identities: OpenID Connect, authorization code with PKCE."""
