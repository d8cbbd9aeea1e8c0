"""Runs inside vLLM's worker processes, as `--worker-extension-cls`. It is copied there alone: nothing of ours is there.

`mettle_reload` reads other weights in place and says how many tokens each request had by then: that is where the new
version begins. On CPUs vLLM keeps packed copies of its linear layers, which its own reload leaves as they were, without
an error: they are made again here.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
import signal

# vLLM's engine is a process of its own; it must not outlive the server that started it, also when that was killed.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class MettleWorker:
    """Methods that vLLM mixes into its worker."""

    def mettle_reload(self, folder):
        """Serve the weights in `folder`; the number of tokens that each request known here has."""
        runner = self.model_runner
        counts = {name: len(request.output_token_ids) for name, request in runner.requests.items()}
        runner.reload_weights(weights_path=folder)
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
