"""Prompt optimisation: a system prompt (and, if asked, tool descriptions) rewritten by reflection on scored rollouts.

The search is the `gepa` library's; the rollouts, the models, the record of what was evaluated and the figures on rows
that the search never saw are ours. Start with `mettle.gepa.run`.
"""
