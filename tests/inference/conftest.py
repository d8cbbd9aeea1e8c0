"""Fixtures: tiny policies in memory and on disk, and servers in front of the embedded engine or of the mock."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))  # for `policies`; pytest's importlib mode leaves sys.path alone

from policies import make_model, save_policy, save_tokenizer, tiny_config

from mettle.clients.renderer import Renderer
from mettle.inference.bridge import Bridge
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.embedded import start_engine
from mettle.inference.engine.mock import MockEngine
from mettle.inference.server import InferenceServer
from mettle.inference.service import ModelService
from mettle.web.keys import Keys
from mettle.web.server import bind

KEYS = Keys(admin="of the tests")


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return make_model(tiny_config())


@pytest.fixture(scope="session")
def other_model() -> PreTrainedModel:
    return make_model(tiny_config(), seed=1)


@pytest.fixture(scope="session")
def policy_folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(model, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Renderer.from_directory(folder)


@pytest.fixture
async def server(policy_folder: Path, renderer: Renderer) -> AsyncIterator[InferenceServer]:
    """The embedded engine behind HTTP."""
    config = InferenceConfig(model=policy_folder, max_slots=8, max_queue=16, seed=0)
    engine = start_engine(config, eos_token_ids=renderer.stop_token_ids, decode_text=renderer.visible_text)
    running = InferenceServer(ModelService(Bridge(engine), renderer, "policy"), bind("127.0.0.1", 0), keys=KEYS)
    await running.start()
    yield running
    await running.stop(0)


@pytest.fixture
def mock_engine() -> MockEngine:
    return MockEngine()


@pytest.fixture
async def mock_server(mock_engine: MockEngine, renderer: Renderer) -> AsyncIterator[InferenceServer]:
    """The mock engine behind HTTP."""
    running = InferenceServer(ModelService(Bridge(mock_engine), renderer, "policy"), bind("127.0.0.1", 0), keys=KEYS)
    await running.start()
    yield running
    await running.stop(0)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """With the admin key of those servers."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEYS.admin}"}) as session:
        yield session
