"""Trains and reads with designs on a device that has no numbers: FakeTensorMode with a backend made in Python, under
autocast to bfloat16. It raises where an operation meets tensors of two devices. Prints a line of JSON for each of
them: what is not on the device, and how often the host waited for it.

A build of torch for CPUs makes no graph of tensors on "cuda", not even fake ones; hence the backend, whose autocast has
no rules of its own. Those here are CUDA's, as far as these models reach them. It is a program of its own because a
backend can be made once in a process.
"""

import json
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import perspectron
from perspectron import presets
from perspectron.model.model import LanguageModel

NARROW = "linear matmul mm bmm addmm baddbmm mv addmv scaled_dot_product_attention"
WIDE = "softplus cumsum cumprod log_softmax.int softmax.int nll_loss exp log rsqrt prod sum pow.Tensor_Scalar"
_setup_privateuseone_for_python_backend("gpu")
torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16]
libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
waits = Counter()
PACKAGE = str(Path(perspectron.__file__).parent)


def rule(name, dtype):
    op = getattr(torch.ops.aten, name.partition(".")[0])

    def cast(x):
        return x.to(dtype) if x.dtype in (torch.float32, torch.bfloat16) and x.device.type == "gpu" else x

    def run(*given, **options):
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            given, options = pytree.tree_map_only(torch.Tensor, cast, (given, options))
            return op(*given, **options)

    libraries[1].impl(name, run, "AutocastPrivateUse1")


def waited(mode, func, x):
    """A number that the host waits for: 1, and where it was asked for."""
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    waits[f"{ours[-1].filename.rpartition('/')[2]}: {ours[-1].name}"] += 1
    return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1


class Copies(TorchDispatchMode):
    """Counts what goes from one device to another, which the host waits for too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            places = {x.device.type for x in (*args, made) if isinstance(x, torch.Tensor)}
            if len(places) > 1:
                waited(None, func, torch.zeros((), dtype=torch.bool))
        return made


def tried(design, resets, T=37):
    """Trains one update's worth, reads a prompt and a token more; returns what is not on the device."""
    config = presets.small(
        design, vocab_size=512, d_model=64, layers=4 if "perspective" in design else 2, seq_len=64
    )
    with torch.device("meta"):
        model = LanguageModel(config)
    with FakeTensorMode(), Copies():
        model._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="gpu"))
        ids = torch.zeros(2, T, dtype=torch.long, device="gpu")
        reset = torch.zeros(2, T, dtype=torch.bool, device="gpu") if resets else None
        model.set_step(1)
        with torch.autocast("gpu", torch.bfloat16):
            output = model(ids, targets=ids, reset_BT=reset)
        loss = output.objective()
        loss.backward()
        # what autocast is to reach has bfloat16, and what it must not has float32
        assert loss.dtype == torch.float32, loss.dtype
        elsewhere = [
            n for n, p in model.named_parameters() if p.grad is not None and p.grad.device.type != "gpu"
        ]
        with torch.no_grad(), torch.autocast("gpu", torch.bfloat16):
            output = model(ids, reset_BT=reset)
            output = model(ids[:, :1], output.state, consume_state=True)
        leaves = [x for x in pytree.tree_leaves(output.state) if isinstance(x, torch.Tensor)]
        return elsewhere + [f"state {tuple(x.shape)}" for x in leaves if x.device.type != "gpu"]


for name in NARROW.split():
    rule(name, torch.bfloat16)
for name in WIDE.split():
    rule(name, torch.float32)
fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = waited
for design in sys.argv[1:]:  # with @, also where no documents begin
    for resets in (False, True)["@" not in design :]:
        waits.clear()
        line = {"design": design, "resets": resets}
        try:
            line["elsewhere"] = tried(design.strip("@"), resets)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in last if frame.filename.startswith(PACKAGE)]
            line["error"] = (
                f"{ours[-1].filename}:{ours[-1].lineno}: {type(error).__name__}: {str(error)[:300]}"
            )
        print(json.dumps(line | {"waits": dict(waits)}), flush=True)
