"""One token of each conversation through a packed Perspective model, with a call or two of the native library for
each half of a layer.

While weights stream through the processor's caches, every small operation of torch finds its code and data evicted and
takes ten times as long as in a loop: seven thousand of them cost as much as a gigabyte of weights. Decoding therefore
has a separate path that computes what the modules compute, up to rounding, independent of the other rows.

`SUITED` says which configs it computes. It knows every field of theirs: one that is not listed there, as a new one,
or that has another value makes the modules decode the model, and the log names it.

Shapes: B rows of the batch, T of them that read a token, D model width, K head width, E experts, A axes of the torus.
"""

import ctypes
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from perspectron import native
from perspectron.designs.perspective.pdr import PDR, PDRConfig, PDRState
from perspectron.designs.transformer.window_gqa import WindowGQA, WindowGQAConfig, WindowGQAState
from perspectron.experts.router import FixedRouter, RoutedConfig
from perspectron.model.block import Block
from perspectron.model.config import BlockConfig, ModelConfig, SequentialConfig
from perspectron.model.ffn import SwiGLU, SwiGLUConfig, TiedConfig
from perspectron.model.model import LanguageModel
from perspectron.model.state import LMState
from perspectron.native.library import load
from perspectron.quant.linear import QuantLinear
from perspectron.stream.experts import PackedExperts
from perspectron.util.errors import StateError

_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _any(*names: str) -> dict[str, tuple[Any, ...] | None]:
    return dict.fromkeys(names)


SUITED: dict[type, dict[str, tuple[Any, ...] | None]] = {
    ModelConfig: {
        **_any(
            "name",
            "vocab_size",
            "d_model",
            "blocks",
            "head",
            "embedding_std",
            "embedding_norm",
            "norm_eps",
            "dropout",
        ),
        "positions": (0,),
        "norm": ("rms",),
        "shift": (False,),
        "first_values": (False,),
    },
    BlockConfig: _any("mixer", "ffn", "residual"),
    SequentialConfig: {},
    PDRConfig: {
        **_any("rank", "scale", "out_norm"),
        "renorm_every": (0,),
        "gate_rank": (0,),
        "fixed_decay": (False,),
    },
    WindowGQAConfig: _any("heads", "kv_heads", "window", "rope_base"),
    SwiGLUConfig: _any("hidden"),
    TiedConfig: _any("block"),
    RoutedConfig: {
        **_any("hidden", "torus", "experts", "nearest", "temperature", "router", "bias_rate", "offsets"),
        "gate": ("none", "straight_through"),
        "reads": ("stream",),
        # What matters in training alone, or is packed into the experts.
        **_any("balance", "smooth", "delta", "diversity", "base", "ternary", "int8_activations"),
        **_any("ternary_rule", "ternary_schedule"),
    },
}
"""The values that each field of a config may have; None: any."""


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


Half = Callable[[int, int, Any], None]
"""Half a layer: from x [T,D] to y [T,D], given as pointers, with the state of the layer."""


class Unsuited(Exception):
    """A part of the model that only the modules can run."""


def check(config: object, where: str = "model") -> None:
    """Unsuited, naming the field, unless `SUITED` has the config and all that it is made of."""
    known = SUITED.get(type(config))
    if known is None:
        raise Unsuited(f"{where} is {type(config).__name__}")
    for field in dataclasses.fields(cast(Any, config)):
        value, name = getattr(config, field.name), f"{where}.{field.name}"
        if field.name not in known or ((allowed := known[field.name]) is not None and value not in allowed):
            raise Unsuited(f"{name} = {value!r}")
        if isinstance(config, BlockConfig) and value is not None:
            check(value, name)
    if isinstance(config, ModelConfig):
        for index, block in enumerate(config.blocks):
            check(block, f"blocks[{index}]")
            if block.mixer is None:
                raise Unsuited(f"blocks[{index}].mixer = None")


class Step:
    """Made once for a model; holds pointers into its tensors. One thread computes at a time: the scratch is one. hooks:
    tables of those that would look on if modules ran."""

    def __init__(self, model: LanguageModel) -> None:
        check(model.config)
        self._library: Any = load().library
        self._keep: list[Tensor] = []
        self._width = model.config.d_model
        self._lock = threading.Lock()
        self._turned: tuple[float, int] | None = None  # rotary base and half width of a head
        self._halves: list[tuple[Half, Half | None]] = []
        for i, block in enumerate(cast("list[Block]", model.blocks)):
            try:
                self._halves.append((self._mixer(block), self._network(block, model.ffn_of(block))))
            except Unsuited as error:
                raise Unsuited(f"blocks[{i}]: {error}") from None
        self.hooks = [x for m in model.modules() for x in (m._forward_hooks, m._forward_pre_hooks)]
        self.hooks += [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]
        self._x = torch.empty(0)
        whole = model.init_state(1, capacity=1, device="meta")
        self._shapes = [[tensor.shape[1:] for tensor in self._tensors(layer)] for layer in whole.layers]

    def takes(self, state: LMState) -> bool:
        """True if the library can write into a state: the shapes are this model's, its windows are there, and all is
        contiguous float32."""
        layers, B = [self._tensors(layer) for layer in state.layers], state.batch_size
        length_B = cast(PDRState, state.layers[0]).length_B
        if length_B.shape != (B,) or length_B.dtype != torch.int64:
            return False
        return [[tensor.shape[1:] for tensor in tensors] for tensors in layers] == self._shapes and all(
            tensor.is_contiguous() and tensor.dtype == torch.float32 and len(tensor) == B
            for tensor in itertools.chain.from_iterable(layers)
        )

    @staticmethod
    def _tensors(layer: object) -> list[Tensor]:
        if isinstance(layer, WindowGQAState):
            return [layer.k_BGWK, layer.v_BGWK]
        return [layer.memory_BDR] if isinstance(layer, PDRState) else []

    def __call__(self, x_BD: Tensor, state: LMState, pad_B: Tensor | None = None) -> tuple[Tensor, LMState]:
        """The output of the last block [B,D], and the new state; the one passed in is used up. A row of padding gives 0
        and keeps its state."""
        with self._lock:
            return self._run(x_BD, state, pad_B)

    def _run(self, x_BD: Tensor, state: LMState, pad_B: Tensor | None) -> tuple[Tensor, LMState]:
        B = len(x_BD)
        reads_B = torch.ones(B, dtype=torch.int64, device="cpu") if pad_B is None else (~pad_B).long()
        row_T = reads_B.nonzero()[:, 0]
        T = self._tokens = len(row_T)
        if T == 0:
            return torch.zeros_like(x_BD), state
        length_B = cast(PDRState, state.layers[0]).length_B
        position_T = length_B.contiguous() if pad_B is None else length_B[row_T]
        self._rows, self._positions = row_T.data_ptr(), position_T.data_ptr()
        if self._turned is not None:  # the angles of the positions, as `ops.attention.rope` has them
            angle_TK = position_T[:, None] * self._frequency
            angles = torch.stack([angle_TK.cos(), angle_TK.sin()]).float()
            self._cosine, self._sine = (part.data_ptr() for part in angles)
        self._threads = native.threads()
        if self._x.shape[1:2] != (T,):
            # Two in turns, and the normed one.
            self._x = torch.empty(3, T, self._width, dtype=torch.float32, device="cpu")
            self._expert = (_LONG * T)()
        self._x[0] = x_BD if pad_B is None else x_BD[row_T]
        here, there, self._normed = (part.data_ptr() for part in self._x)
        first = here
        for (mixer, network), layer in zip(self._halves, state.layers, strict=True):
            mixer(here, there, layer)
            if network is None:
                here, there = there, here
            else:
                network(there, here, None)
        y_TD = self._x[0 if here == first else 1]
        y_BD = y_TD.clone() if pad_B is None else torch.zeros_like(x_BD).index_copy_(0, row_T, y_TD)
        lengths = (length_B + reads_B).repeat(len(self._halves), 1)
        pairs = zip(state.layers, lengths, strict=True)
        after = (dataclasses.replace(layer, length_B=now_B) for layer, now_B in pairs)
        return y_BD, LMState(tuple(after), None, state.model)

    # ------------------------------------------------------------ what a layer is made of

    def _mixer(self, block: Block) -> Half:
        if isinstance(block.mixer, PDR):
            return self._pdr(block.mixer, block.mixer_norm)
        return self._gqa(cast(WindowGQA, block.mixer), block.mixer_norm)

    def _pdr(self, mixer: PDR, norm: nn.Module) -> Half:
        rank = mixer.config.rank
        scale = rank**-0.5 if mixer.config.scale is None else mixer.config.scale
        out = self._norm(mixer.norm)[0] if mixer.config.out_norm else None
        weight, eps = self._norm(norm)
        parts = (mixer.p_proj, mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj)
        layer = _Pdr(weight, out, eps, scale, *map(self._linear, parts))
        call, reference = self._library.pspx_step_pdr, ctypes.byref(layer)

        def run(x: int, y: int, state: PDRState) -> None:
            memory = state.memory_BDR.data_ptr(), len(state.memory_BDR)
            _done(call(reference, x, self._tokens, self._rows, *memory, y, self._threads))

        return run

    def _gqa(self, mixer: WindowGQA, norm: nn.Module) -> Half:
        config, half = mixer.config, mixer.width // 2
        turned = config.rope_base, half
        if self._turned not in (None, turned):
            raise Unsuited("heads of other width or rotation than those before")
        self._turned = turned
        exponent = -torch.arange(half, dtype=torch.float64, device="cpu") / half
        self._frequency = config.rope_base**exponent
        weight, eps = self._norm(norm)
        parts = (mixer.q_proj, mixer.kv_proj, mixer.o_proj)
        sizes = (config.heads, config.kv_heads, config.window)
        layer = _Gqa(weight, eps, *map(self._linear, parts), *sizes)
        call, reference = self._library.pspx_step_gqa, ctypes.byref(layer)

        def run(x: int, y: int, state: WindowGQAState) -> None:
            rings = state.k_BGWK.data_ptr(), state.v_BGWK.data_ptr(), len(state.k_BGWK)
            places = self._positions, self._cosine, self._sine
            _done(call(reference, x, self._tokens, self._rows, *rings, *places, y, self._threads))

        return run

    def _network(self, block: Block, ffn: nn.Module | None) -> Half | None:
        if ffn is None:
            return None
        norm = self._norm(block.ffn_norm)
        if isinstance(ffn, SwiGLU):
            return self._dense(ffn, norm)
        return self._routed(cast(PackedExperts, ffn), norm)

    def _dense(self, ffn: SwiGLU, norm: tuple[int, float]) -> Half:
        parts = [self._linear(part) for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj)]
        if len({part.format for part in parts}) > 1:
            raise Unsuited("matrices of a SwiGLU in several formats")
        pointers = list(itertools.chain.from_iterable((part.codes, part.scales) for part in parts))
        normalise, feed = self._library.pspx_norm, self._library.pspx_swiglu
        hidden, format, width = parts[0].rows, parts[0].format, self._width

        def run(x: int, y: int, state: None) -> None:
            normed, T = self._normed, self._tokens
            normalise(x, *norm, T, width, normed)
            feed(normed, T, None, width, hidden, *pointers, format, x, y, self._threads)

        return run

    def _routed(self, ffn: PackedExperts, norm: tuple[int, float]) -> Half:
        routes = [self._route(one.router) for one in (ffn, *ffn.following)]
        normalise, feed = self._library.pspx_norm, self._library.pspx_swiglu
        width, hidden, format = self._width, ffn.config.hidden, native.FORMATS.index("ternary")

        def run(x: int, y: int, state: None) -> None:
            normed, T = self._normed, self._tokens
            normalise(x, *norm, T, width, normed)
            for rows, (gate, up, down) in ffn.visit(routes[0](), lambda: [route() for route in routes[1:]]):
                n, where = len(rows), None if len(rows) == T else (_LONG * len(rows))(*rows)
                feed(
                    normed, n, where, width, hidden,
                    gate.codes.data_ptr(), gate.scales.data_ptr(), up.codes.data_ptr(), up.scales.data_ptr(),
                    down.codes.data_ptr(), down.scales.data_ptr(), format, x, y, self._threads,
                )  # fmt: skip

        return run

    def _route(self, router: FixedRouter) -> Callable[[], list[int]]:
        """A function that gives the expert of each normed token."""
        weight_AD, bias_A, place_EA, handicap_E = router.used
        E, A, call = len(bias_A if place_EA is None else place_EA), len(bias_A), self._library.pspx_route
        matrix = self._width, self._floats(weight_AD), self._floats(bias_A), A
        places = (None if part is None else self._floats(part) for part in (place_EA, handicap_E))
        arguments = (*matrix, *places, E, None, None)

        def run() -> list[int]:
            call(self._normed, self._tokens, *arguments, self._expert)
            return list(self._expert)

        return run

    # ------------------------------------------------------------ pointers

    def _pointer(self, tensor: Tensor) -> int:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise Unsuited("weights elsewhere than in the memory of the CPU")
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _floats(self, tensor: Tensor) -> int:
        if tensor.dtype != torch.float32:
            raise Unsuited(f"{tensor.dtype} weights")
        return self._pointer(tensor)

    def _norm(self, module: nn.Module) -> tuple[int, float]:
        if not isinstance(module, nn.RMSNorm) or module.eps is None:
            raise Unsuited(f"norm {type(module).__name__}")
        return self._floats(module.weight), module.eps

    def _linear(self, module: nn.Module) -> _Linear:
        if not isinstance(module, QuantLinear):
            raise Unsuited("a matrix that is not packed")
        bias = None if module.bias is None else self._floats(module.bias)
        codes, scales = self._pointer(module.codes), self._pointer(module.scales)
        format = native.FORMATS.index(module.format)
        return _Linear(codes, scales, bias, format, module.out_features, module.in_features)


def step_of(model: LanguageModel) -> Step | None:
    """None for a model of other parts, which the log names, and where there is no native library."""
    if not native.available():
        return None
    try:
        return Step(model)
    except Unsuited as error:
        logging.getLogger("perspectron").info("%s is decoded module by module: %s", model.config.name, error)
        return None


def _done(code: int) -> None:
    if code:
        raise StateError(
            "the state has a position below 0 or fewer rows than the tokens; load it again from its file"
        )
