"""Shared fields reach their components, and contradictions are named."""

import pytest

from mettle.runs.config import RunConfig
from mettle.runs.hosted import REFUSED, fan_out


def test_shared_fields_reach_every_component():
    tree = fan_out({"max_steps": 7, "seed": 3})
    assert tree["trainer"]["max_steps"] == tree["orchestrator"]["max_steps"] == 7
    assert tree["warm_up"]["sft"]["seed"] == tree["inference"]["seed"] == 3


def test_the_hosted_schema_reads_as_it_stands():
    tree = fan_out(
        {
            "model": "Qwen/Qwen3-4B",
            "batch_size": 256,
            "rollouts_per_example": 8,
            "learning_rate": 1e-4,
            "max_async_level": 2,
            "sampling": {"max_tokens": 512},
            "env": [{"id": "owner/name", "args": {"n": 3}}],
        }
    )
    orchestrator = tree["orchestrator"]
    assert tree["model"] == {"path": "Qwen/Qwen3-4B"}
    assert (orchestrator["batch_size"], orchestrator["group_size"], orchestrator["max_lag"]) == (256, 8, 2)
    assert orchestrator["envs"] == [{"id": "owner/name", "args": {"n": 3}}]
    assert orchestrator["sampling"] == {"max_tokens": 512}
    assert tree["trainer"]["optim"]["lr"] == 1e-4


def test_a_value_said_in_one_component_holds_for_the_others():
    assert fan_out({"trainer": {"max_steps": 9}})["orchestrator"]["max_steps"] == 9


def test_two_places_that_disagree_are_an_error():
    with pytest.raises(ValueError, match=r"trainer.max_steps = 9 contradicts the shared max_steps = 7"):
        fan_out({"max_steps": 7, "trainer": {"max_steps": 9}})


def test_a_resolved_config_is_read_back_as_it_was_written():
    """A run writes its config with every default and reads it on resume; both stand beside what was shared."""
    said = {
        "env": [{"id": "reverse-text", "args": {"n": 3}}],
        "sampling": {"max_tokens": 8},
        "eval": {"interval": 5},
        "lora_rank": 8,
        "learning_rate": 1e-4,
    }
    config = RunConfig.model_validate(said)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    written = config.model_dump(mode="json") | {"env": [{"id": "wordle"}]}
    with pytest.raises(ValueError, match="contradicts the shared env"):
        RunConfig.model_validate(written)


def test_the_given_tree_is_left_alone():
    tree = {"seed": 1, "trainer": {}}
    fan_out(tree)
    assert tree == {"seed": 1, "trainer": {}}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hosted_field_without_a_counterpart_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is not offered, and would change the result"):
        fan_out({name: 1})


def test_validation_and_tracking_of_the_field_have_their_counterparts():
    tree = fan_out({"val": {"num_examples": 3, "interval": 5}, "wandb": {"project": "x", "entity": "us"}})
    assert tree["orchestrator"]["eval"] == {"num_examples": 3, "interval": 5}
    assert tree["tracking"]["wandb"] == {"project": "x", "entity": "us"}
    with pytest.raises(ValueError, match=r"orchestrator.eval = .* contradicts the shared val"):
        fan_out({"eval": {"num_examples": 4}, "val": {"num_examples": 3}})


def test_the_hosted_fields_of_adapters_make_the_run_train_them():
    tree = fan_out({"model": "some/model", "lora_alpha": 16, "lora_rank": 8})
    assert tree["model"] == {"path": "some/model", "lora": {"rank": 8, "alpha": 16}}
    assert tree["trainer"]["lora"] == {"rank": 8, "alpha": 16}
    assert fan_out({"lora_alpha": 64})["trainer"]["lora"] == {"alpha": 64}
    assert "lora" not in fan_out({})["trainer"]
    with pytest.raises(ValueError, match=r"model.lora.rank = 4 contradicts the shared lora_rank = 8"):
        fan_out({"model": {"lora": {"rank": 4}}, "lora_rank": 8})
