"""An environment that an untrained policy already scores on: the share of ASCII characters in the answer."""

import mettle.envs as vf


def ascii_share(completion: list[dict[str, str]]) -> float:
    """Share of characters that are ASCII; an empty answer scores 0."""
    text = completion[-1]["content"] or ""
    return sum(character.isascii() for character in text) / len(text) if text else 0.0


def load_environment(num_train: int = 2000, num_eval: int = 8) -> vf.Environment:
    """Words as questions; the answers do not matter."""
    rows = [{"question": f"say {number}", "answer": "abc"} for number in range(num_train + num_eval)]
    return vf.SingleTurnEnv(
        dataset=rows[:num_train], eval_dataset=rows[num_train:], rubric=vf.Rubric(funcs=[ascii_share])
    )
