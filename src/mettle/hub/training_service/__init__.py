"""The training service under the Hub's own port: programs of the `tinker` SDK train adapters on the operator's models.

Parts: `offers` (which base models, where each answers), `supervisor` (a process for each, looked after and counted),
`proxy` (a request passed on). Invariants: who asks is a person with a token, whom the process hears of by their id
alone; nothing is computed in the Hub's own process.
"""
