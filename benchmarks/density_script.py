"""What the public script of Mukherjee et al. (2025) does, call by call: python density_script.py BASE TUNED.

Both models are loaded whole with transformers in bfloat16; every parameter's difference is taken and kept, and all are
concatenated; exact zeros are counted, then entries close to zero at 1e-5; last, the shares of entries that are *not*
zero are averaged over the tensors of each layer, unweighted, which the original prints as sparsity.

Departures: the options that choose a device, a cache and other tolerances are left out (the CPU needs no device map);
progress bars are off; the numbers are printed as JSON, with the time that passed since the imports were done.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["TQDM_DISABLE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def density(base_path: str, tuned_path: str) -> dict[str, object]:
    """Shares of zeros and of near zeros, and mean share of other entries by layer."""
    base, tuned = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (base_path, tuned_path)
    )
    tuned_state, base_state = tuned.state_dict(), base.state_dict()
    deltas, shares = [], {}
    with torch.no_grad():
        for name, _ in base.named_parameters():
            delta = tuned_state[name] - base_state[name]
            shares[name] = (delta != 0).sum().item() / delta.numel()
            deltas.append(delta.view(-1))
    together = torch.cat(deltas, dim=0)
    zeros = (together == 0).sum().item() / len(together)
    nothing = torch.zeros_like(together)
    close = torch.isclose(together, nothing, atol=1e-5).sum().item() / together.numel()
    layers: dict[str, list[float]] = {}
    for name, share in shares.items():
        if name.startswith("model.layers"):
            layers.setdefault(name.split(".")[2], []).append(share)
    return {
        "parameters": len(together),
        "zeros": zeros,
        "close": close,
        "layers": {layer: sum(found) / len(found) for layer, found in layers.items()},
    }


if __name__ == "__main__":
    logging.disable_progress_bar()
    started = time.perf_counter()
    result = density(sys.argv[1], sys.argv[2])
    print(json.dumps(result | {"seconds": time.perf_counter() - started}))
