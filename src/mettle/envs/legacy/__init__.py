"""What environments of earlier verifiers releases expect beyond the library itself.

Parts: `paths` (every historical module path, and where its names are here), `overrides` (methods overridden with the
signatures of 0.1.2 to 0.1.9), `parts` (calls that pass a rollout's parts one by one), `messages`, `responses`,
`asynchrony`, `clients`, `logs`, `results` (the functions of `verifiers.utils`), `unavailable` (names that can be
imported and not used).
Invariant: nothing in the library's own loop depends on anything here, except for one call when a class is defined.
"""
