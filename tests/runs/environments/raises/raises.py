"""An environment whose reward raises: always, or for one rollout in `every`."""

import itertools

import mettle.envs as vf


def load_environment(every: int = 1, num_train: int = 2000, num_eval: int = 8) -> vf.Environment:
    """Words as questions; the score is the share of ASCII characters, where there is one."""
    numbers = itertools.count(1)

    def brittle(completion: list[dict[str, str]]) -> float:
        """Share of characters that are ASCII; raises for every `every`-th rollout."""
        if next(numbers) % every == 0:
            raise RuntimeError("the judge has a headache")
        text = completion[-1]["content"] or ""
        return sum(character.isascii() for character in text) / len(text) if text else 0.0

    rows = [{"question": f"say {number}", "answer": "abc"} for number in range(num_train + num_eval)]
    return vf.SingleTurnEnv(dataset=rows[:num_train], eval_dataset=rows[num_train:], rubric=vf.Rubric(funcs=[brittle]))
