"""Is an environment fit for training? Data looked at, rewards tested without a model, code linted, evaluations judged.

    checks.py       one question with its answer: pass, warn, fail, untested
    data/           a dataset: read, described, its answer format found, what reward suits it
    rewards/        answers made from the data, scored as a rollout is, and what their rewards must obey
    lint/           rules against rewards that can be had without the answer; in the source, and by trying
    evaluations.py  the distribution of an evaluation's rewards; advice.py: what to change before training
    card.py         all of it about one package, and its Markdown

Invariant: nothing is green that was not tried; what could not be tried is said so.
"""
