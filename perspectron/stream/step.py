"""One token through a packed Perspective model with two calls of the native library for each half of a layer.

While weights stream through the caches, every small operation of torch finds its code and data evicted, and takes ten
times as long as in a loop of its own: seven thousand of them cost as much as a gigabyte of weights. So decoding has a
way of its own, which computes what the modules compute, up to rounding.

Shapes: D model width, K head width, E experts, A axes of the torus.
"""

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from perspectron import native
from perspectron.block import Block
from perspectron.config import SequentialConfig
from perspectron.ffn import SwiGLU
from perspectron.mixers.pdr import PDR, PDRState
from perspectron.mixers.window_gqa import WindowGQA, WindowGQAState
from perspectron.model import LanguageModel
from perspectron.native.library import load
from perspectron.quant.linear import QuantLinear
from perspectron.state import LMState
from perspectron.stream.experts import PackedExperts

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("codes", "scales", "bias")),
        *((name, _LONG) for name in ("format", "rows", "columns")),
    )


class _Pdr(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("norm", "out_norm")),
        *((name, _DOUBLE) for name in ("eps", "scale")),
        *((name, _Linear) for name in "pqkvo"),
    )


class _Gqa(ctypes.Structure):
    _fields_ = (
        ("norm", _POINTER),
        ("eps", _DOUBLE),
        *((name, _Linear) for name in ("q", "kv", "o")),
        *((name, _LONG) for name in ("heads", "kv_heads", "window")),
    )


class _Router(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias", "place", "handicap")),
        *((name, _LONG) for name in ("axes", "experts", "width")),
    )


Half = Callable[[int, int, Any], None]
"""Half a layer: from x to y, given as pointers, with the state of the layer."""


class _Unsuited(Exception):
    """A part of the model that only the modules can run."""


class Step:
    """Made once for a model; holds pointers into its tensors. One thread computes at a time: the scratch is one."""

    def __init__(self, model: LanguageModel) -> None:
        self._library: Any = load().library
        self._keep: list[Tensor] = []
        self._width = model.config.d_model
        self._lock = threading.Lock()
        self._turned: tuple[float, int] | None = None  # rotary base and half width of a head
        self._halves: list[tuple[Half, Half | None]] = []
        if model.config.positions > 0:
            raise _Unsuited("learned positions")
        for i, block in enumerate(cast("list[Block]", model.blocks)):
            try:
                self._halves.append((self._mixer(block), self._network(block, model.ffn_of(block))))
            except _Unsuited as error:
                raise _Unsuited(f"block {i}, {error}") from None
        # Two in turns, and the normed one.
        self._x = torch.empty(3, self._width, dtype=torch.float32, device="cpu")

    def takes(self, state: LMState) -> bool:
        """Whether the tensors of a state are such as the library can write into: its windows there, all contiguous."""
        tensors: tuple[Tensor, ...]
        for layer in state.layers:
            if isinstance(layer, PDRState):
                tensors, room = (layer.memory_BDR,), True
            elif isinstance(layer, WindowGQAState):
                tensors, room = (layer.k_BGWK, layer.v_BGWK), layer.k_BGWK.shape[2] > 0
            else:
                return False
            if not room or not all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors):
                return False
        return True

    def __call__(self, x_D: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        """What the last block gives [D], and the new state; the one handed in is used up."""
        with self._lock:
            return self._run(x_D, state)

    def _run(self, x_D: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        length = int(cast(PDRState, state.layers[0]).length_B)
        lengths = torch.full((len(self._halves),), length + 1, dtype=torch.int64, device="cpu").split(1)
        self._position = length
        self._turn()
        self._threads = native.threads()
        self._x[0] = x_D
        start, pitch = self._x.data_ptr(), 4 * self._width
        here, there = start, start + pitch
        self._normed = start + 2 * pitch
        for (mixer, network), layer in zip(self._halves, state.layers, strict=True):
            mixer(here, there, layer)
            if network is None:
                here, there = there, here
            else:
                network(there, here, None)
        after = (_moved(layer, now) for layer, now in zip(state.layers, lengths, strict=True))
        return self._x[(here - start) // pitch].clone(), LMState(tuple(after))

    def _turn(self) -> None:
        """The angles of the position, as `ops.attention.rope` has them."""
        if self._turned is not None:
            angle = self._position * self._frequency
            self._angles = torch.stack([angle.cos(), angle.sin()]).float()
            self._cosine = self._angles.data_ptr()
            self._sine = self._cosine + 4 * len(angle)

    # ------------------------------------------------------------ what a layer is made of

    def _mixer(self, block: Block) -> Half:
        if not isinstance(block.config.residual, SequentialConfig):
            raise _Unsuited("residual")
        mixer, norm = block.mixer, block.mixer_norm
        if isinstance(mixer, PDR) and mixer.config.renorm_every == 0:
            if mixer.config.gate_rank or mixer.config.fixed_decay:
                raise _Unsuited("a decay gate that is not one full matrix")
            return self._pdr(mixer, norm)
        if isinstance(mixer, WindowGQA):
            return self._gqa(mixer, norm)
        raise _Unsuited(f"mixer {type(mixer).__name__}")

    def _pdr(self, mixer: PDR, norm: nn.Module) -> Half:
        rank = mixer.config.rank
        scale = rank**-0.5 if mixer.config.scale is None else mixer.config.scale
        out = self._norm(mixer.norm)[0] if mixer.config.out_norm else None
        weight, eps = self._norm(norm)
        parts = (mixer.p_proj, mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj)
        layer = _Pdr(weight, out, eps, scale, *map(self._linear, parts))
        call, reference = self._library.pspx_step_pdr, ctypes.byref(layer)

        def run(x: int, y: int, state: PDRState) -> None:
            call(reference, x, state.memory_BDR.data_ptr(), y, self._threads)

        return run

    def _gqa(self, mixer: WindowGQA, norm: nn.Module) -> Half:
        config, half = mixer.config, mixer.width // 2
        turned = config.rope_base, half
        if self._turned not in (None, turned):
            raise _Unsuited("heads of other width or rotation than those before")
        self._turned = turned
        exponent = -torch.arange(half, dtype=torch.float64, device="cpu") / half
        self._frequency = config.rope_base**exponent
        weight, eps = self._norm(norm)
        parts = (mixer.q_proj, mixer.kv_proj, mixer.o_proj)
        sizes = (config.heads, config.kv_heads, config.window)
        layer = _Gqa(weight, eps, *map(self._linear, parts), *sizes)
        call, reference = self._library.pspx_step_gqa, ctypes.byref(layer)

        def run(x: int, y: int, state: WindowGQAState) -> None:
            keys, values = state.k_BGWK.data_ptr(), state.v_BGWK.data_ptr()
            call(reference, x, keys, values, self._position, self._cosine, self._sine, y, self._threads)

        return run

    def _network(self, block: Block, ffn: nn.Module | None) -> Half | None:
        if ffn is None:
            return None
        norm = self._norm(block.ffn_norm)
        if isinstance(ffn, SwiGLU):
            return self._dense(ffn, norm)
        if isinstance(ffn, PackedExperts) and ffn.config.gate != "soft":
            return self._routed(ffn, norm)
        raise _Unsuited(f"feed-forward network {type(ffn).__name__}")

    def _dense(self, ffn: SwiGLU, norm: tuple[int, float]) -> Half:
        parts = [self._linear(part) for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj)]
        if len({part.format for part in parts}) > 1:
            raise _Unsuited("matrices of a SwiGLU in several formats")
        pointers = list(itertools.chain.from_iterable((part.codes, part.scales) for part in parts))
        normalise, feed = self._library.pspx_norm, self._library.pspx_swiglu
        hidden, format, width = parts[0].rows, parts[0].format, self._width

        def run(x: int, y: int, state: None) -> None:
            normalise(x, *norm, width, self._normed)
            feed(self._normed, 1, width, hidden, *pointers, format, x, y, self._threads)

        return run

    def _routed(self, ffn: PackedExperts, norm: tuple[int, float]) -> Half:
        route, routers = (
            self._library.pspx_route,
            [ctypes.byref(self._router(one)) for one in (ffn, *ffn.following)],
        )
        normalise, feed = self._library.pspx_norm, self._library.pspx_swiglu
        layer, source, width, hidden = ffn.layer, ffn.source, self._width, ffn.config.hidden
        after = [one.layer for one in ffn.following]
        format = native.FORMATS.index("ternary")

        def run(x: int, y: int, state: None) -> None:
            normed = self._normed
            normalise(x, *norm, width, normed)
            with source.get(layer, route(routers[0], normed)) as shard:
                for router, following in zip(routers[1:], after, strict=True):
                    source.hint(following, route(router, normed))
                gate, up, down = shard
                feed(
                    normed, 1, width, hidden,
                    gate.codes.data_ptr(), gate.scales.data_ptr(), up.codes.data_ptr(), up.scales.data_ptr(),
                    down.codes.data_ptr(), down.scales.data_ptr(), format, x, y, self._threads,
                )  # fmt: skip

        return run

    # ------------------------------------------------------------ pointers

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise _Unsuited("weights elsewhere than in the memory of the CPU")
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _floats(self, tensor: Tensor) -> int:
        if tensor.dtype != torch.float32:
            raise _Unsuited(f"{tensor.dtype} weights")
        return cast(int, self._pointer(tensor))

    def _norm(self, module: nn.Module) -> tuple[int, float]:
        if not isinstance(module, nn.RMSNorm) or module.eps is None:
            raise _Unsuited(f"norm {type(module).__name__}")
        return self._floats(module.weight), module.eps

    def _linear(self, module: nn.Module) -> _Linear:
        if not isinstance(module, QuantLinear):
            raise _Unsuited("a matrix that is not packed")
        bias = None if module.bias is None else self._floats(module.bias)
        codes, scales = self._pointer(module.codes), self._pointer(module.scales)
        format = native.FORMATS.index(module.format)
        return _Linear(codes, scales, bias, format, module.out_features, module.in_features)

    def _router(self, ffn: PackedExperts) -> _Router:
        weight_AD, bias_A, place_EA = ffn.router
        handicap = self._floats(ffn.bias_E) if ffn.config.bias_rate > 0 else None
        switch = ffn.config.router == "switch"
        place = None if switch else self._floats(place_EA)
        experts = len(weight_AD) if switch else len(place_EA)
        weight, bias = self._floats(weight_AD), self._floats(bias_A)
        return _Router(weight, bias, place, handicap, len(weight_AD), experts, self._width)


def step_of(model: LanguageModel) -> Step | None:
    """None for a model of other parts, which the log names, and where there is no native library."""
    if not native.available():
        return None
    try:
        return Step(model)
    except _Unsuited as error:
        logging.getLogger("perspectron").info("%s is decoded module by module: %s", model.config.name, error)
        return None


def _moved(layer: object, length_B: Tensor) -> Any:
    if isinstance(layer, PDRState):
        return PDRState(layer.memory_BDR, length_B)
    assert isinstance(layer, WindowGQAState)
    return WindowGQAState(layer.k_BGWK, layer.v_BGWK, length_B)
