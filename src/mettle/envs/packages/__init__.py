"""Environments as packages: found, loaded, made from a template; `import verifiers` inside this process."""
