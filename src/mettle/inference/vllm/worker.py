"""Runs inside vLLM's worker processes, as `--worker-extension-cls`. It is copied there with `engine.broadcast`, under
the name below: nothing else of ours is there.

`mettle_reload` takes other weights in place, by collective or from their file, and says how many tokens each request
had by then: that is where the new version begins. On CPUs vLLM keeps packed copies of its linear layers, which its own
reload leaves as they were, without an error: they are made again here. A second fault of vLLM's on CPUs, of seeds, is
mended while this is imported.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
import signal
from pathlib import Path

from mettle_weight_broadcast import receive

# vLLM's engine is a process of its own; it must not outlive the server that started it, also when that was killed.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _keep_seeds_on_cpus():
    """A request with a seed whose prompt is computed in parts must not end the process.

    After each part vLLM winds the request's generator back by an offset, and generators on CPUs have none. Such a
    request has drawn nothing yet, so that its generator may begin anew instead.
    """
    import numpy as np
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not current_platform.is_cpu():
        return
    bookkeeping = GPUModelRunner._bookkeeping_sync

    def without_offsets(self, *args, **kwargs):
        generators = self.input_batch.generators
        rows = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        begun = {int(row): generators.pop(int(row)) for row in rows if int(row) in generators}
        for generator in begun.values():
            generator.manual_seed(generator.initial_seed())
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(begun)

    GPUModelRunner._bookkeeping_sync = without_offsets


_keep_seeds_on_cpus()


class MettleWorker:
    """Methods that vLLM mixes into its worker."""

    def mettle_reload(self, folder):
        """Serve the weights in `folder`; the number of tokens that each request known here has."""
        runner = self.model_runner
        counts = {name: len(request.output_token_ids) for name, request in runner.requests.items()}
        state = receive(Path(folder))
        if state is None:
            runner.reload_weights(weights_path=folder)
        else:
            runner.reload_weights(weights_iterator=iter(state.items()))
        num_packed = self._mettle_repack(runner.get_model())
        return {"counts": counts, "repacked": num_packed}

    def _mettle_repack(self, model):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        num_packed = 0
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
                num_packed += 1
        return num_packed
