"""What environments of earlier verifiers releases expect beyond the library itself.

Parts: `adaptation` (what a class passes through when it is defined), `overrides` (methods overridden with the
signatures of 0.1.2 to 0.1.9), `parts` (calls that pass a rollout's parts one by one), `methods` (those that the base
classes had), `aliases` and `paths` (`import verifiers`: every historical module path, and where its names are here),
`prime_sandboxes` (the same for that name), `messages`, `responses`, `asynchrony`, `clients`, `logs`, `results` (the
functions of `verifiers.utils`), `unavailable` (names that can be imported and not used).
Invariant: nothing in the library's own loop imports or runs anything here. Classes come in through the door in
`definitions`, which `mettle.envs` opens; modules where they are imported, in `packages.loading` and `rubrics.worker`.
"""
