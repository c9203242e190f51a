"""What a plan is made for: the device, the memory convention, the model. All of them are data files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from mindferry.errors import UsageError, did_you_mean
from mindferry.spec import DType, ModelSpec, NonNegativeFloat, PositiveFloat, PositiveInt, Spec, spec_from

MAX_FILE_BYTES = 1 << 19
MAX_BRACKETS = 50
_DATA = Path(__file__).parent / "data"


class Device(Spec):
    """One accelerator and its links. FLOP/s dense, bytes, bytes/s one way per device, seconds.

    Attributes:
        gemm_efficiency_forward, gemm_efficiency_backward: share of `flops` a whole layer reaches.
        element_wise_passes: how often a layer's saved activations travel through memory in element-wise
            work, a forward and backward pass together; 0 where the efficiencies above already hold that time.
        layer_overhead: seconds of starting kernels in one layer's forward; twice that in its backward.
        gemm_passes: factor on the time of matrix products, beside the efficiencies.
        attention_passes, head_passes, optimizer_passes: as element_wise_passes for the s x s scores (None: the
            same), for the logits, and a factor on the optimizer's traffic.
        step_overhead: seconds a step takes beside all that.
        static_factor, activation_factor, attention_factor, logit_factor: what the memory formulas for model states,
            activations, scores and logits are to be multiplied by.
        resident_bytes: memory of the process beside all that.
        usable_memory: share of memory_bytes a run may plan with.
        fused_attention: whether attention runs without keeping the s x s scores, unless a YAML says otherwise.
        overlap: share of tensor-parallel communication hidden behind computation.
        confidence: of the data sheet numbers; `measured` after a calibration.
    """

    name: str
    flops: dict[DType, PositiveFloat] = Field(min_length=1)
    memory_bytes: PositiveInt
    memory_bandwidth: PositiveFloat
    devices_per_host: PositiveInt = 8
    intra_host_bandwidth: PositiveFloat | None = None
    inter_host_bandwidth: PositiveFloat | None = None
    intra_host_latency: NonNegativeFloat = 5e-6
    inter_host_latency: NonNegativeFloat = 1e-5
    gemm_efficiency_forward: float = Field(default=0.5, gt=0, le=1)
    gemm_efficiency_backward: float = Field(default=0.55, gt=0, le=1)
    element_wise_passes: NonNegativeFloat = 0.0
    layer_overhead: NonNegativeFloat = 5e-5
    gemm_passes: NonNegativeFloat = 1.0
    attention_passes: NonNegativeFloat | None = None
    head_passes: NonNegativeFloat = 0.0
    optimizer_passes: NonNegativeFloat = 1.0
    step_overhead: NonNegativeFloat = 0.0
    static_factor: NonNegativeFloat = 1.0
    activation_factor: NonNegativeFloat = 1.0
    attention_factor: NonNegativeFloat = 1.0
    logit_factor: NonNegativeFloat = 1.0
    resident_bytes: NonNegativeFloat = 0.0
    usable_memory: float = Field(default=0.9, gt=0, le=1)
    overlap: float = Field(default=0.0, ge=0, lt=1)
    fused_attention: bool = True
    confidence: Literal["high", "medium", "low", "measured"] = "low"
    source: str

    def peak(self, dtype: DType) -> float:
        """FLOP/s in `dtype`; float16 and bfloat16 stand in for each other.

        Raises:
            UsageError: the device's file gives no rate for the type.
        """
        for candidate in (dtype, {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, dtype)):
            if candidate in self.flops:
                return self.flops[candidate]
        raise UsageError(
            f"device {self.name}: no rate for {dtype}, only for {', '.join(self.flops)}",
            remedy="give --hardware FILE with flops for it",
            id="plan.device",
        )

    def bandwidth(self, inside_host: bool) -> float:
        """Bytes/s of one link, one way; a missing figure falls back to the memory's bandwidth."""
        link = self.intra_host_bandwidth if inside_host else self.inter_host_bandwidth
        return link or self.intra_host_bandwidth or self.memory_bandwidth

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.usable_memory)


class Convention(Spec):
    """Which bytes a run keeps; see data/conventions.yaml for the meaning of each field."""

    name: str
    parameter: PositiveInt
    gradient: PositiveInt
    state: PositiveInt
    compute_copy: int = Field(ge=0)
    element: PositiveInt
    layernorm_input: PositiveInt
    attention_core: NonNegativeFloat
    flash_statistics: NonNegativeFloat
    mask_bytes: int = Field(ge=0)
    always_masks: bool
    attention_mask: int = Field(ge=0)
    logit: PositiveInt
    accumulates: bool
    shards_parameters_from: int = Field(ge=1, le=3)
    shards_gradients_from: int = Field(ge=1, le=3)
    select: tuple[Literal["core_attention", "mlp_activation"], ...]
    select_core_passes: PositiveInt = 1
    source: str


class Preset(Spec):
    """An entry of data/models.yaml."""

    shape: str
    sizes: dict[str, Any]
    source: str

    model_config = ConfigDict(frozen=True, extra="forbid")


def load_yaml(path: Path) -> Any:
    """The YAML (1.2, safe) document in `path`.

    Raises:
        UsageError: missing, too big, not UTF-8, or not one YAML document.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.is_file():
        raise UsageError(f"{path}: no such file", remedy="check the path", id="plan.no-file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UsageError(
            f"{path}: {path.stat().st_size} bytes, expected a YAML file of at most {MAX_FILE_BYTES}",
            remedy="give the run's YAML, not its data",
            id="plan.file-too-big",
        )
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_bombs(text, path)
        return YAML(typ="safe", pure=True).load(text)
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", remedy="give a YAML file", id="plan.not-yaml") from None
    except (YAMLError, RecursionError, ValueError) as err:
        line = str(err).strip().replace("\n", " ")[:300]
        raise UsageError(
            f"{path}: not readable as YAML: {line}", remedy="correct it", id="plan.not-yaml"
        ) from None


def _refuse_bombs(text: str, path: Path) -> None:
    # Aliases of aliases grow exponentially once walked; a training YAML has a handful.
    import re

    if re.search(r"[\[{]\s*" * MAX_BRACKETS, text):
        raise UsageError(
            f"{path}: more than {MAX_BRACKETS} brackets inside each other",
            remedy="write it flatter",
            id="plan.not-yaml",
        )
    if len(re.findall(r"(?:^|[\s\[,{:-])\*[A-Za-z_][\w-]*", text)) > 500:
        raise UsageError(f"{path}: more than 500 YAML aliases", remedy="write values out", id="plan.not-yaml")


@functools.cache
def _data(name: str) -> Any:
    return load_yaml(_DATA / f"{name}.yaml")


def devices() -> dict[str, Device]:
    """The shipped devices by name."""
    return {
        name: spec_from(Device, {"name": name, **values}, f"devices.yaml: {name}")
        for name, values in _data("devices")["devices"].items()
    }


def device(name: str) -> Device:
    """A shipped device.

    Raises:
        UsageError: no such device; the nearest names are given.
    """
    known = devices()
    if name not in known:
        hint = did_you_mean(name, known) or f"known: {', '.join(known)}"
        raise UsageError(
            f"--device {name}: no such device; {hint}", remedy="or --hardware FILE", id="plan.device"
        )
    return known[name]


def device_from_file(path: Path) -> Device:
    """A device from the person's own file: the fields of `Device`, at the top or under `device:`.

    Raises:
        UsageError: a field is missing, unknown or of the wrong kind; all of them are named.
    """
    values = load_yaml(path)
    if isinstance(values, Mapping) and isinstance(values.get("device"), Mapping):
        values = values["device"]
    if not isinstance(values, Mapping):
        raise UsageError(f"{path}: found {type(values).__name__}, expected a mapping of device fields",
                         remedy="see docs/plan.md for an example", id="plan.device")  # fmt: skip
    given = {str(key): value for key, value in values.items()}
    given.setdefault("name", path.stem)
    given.setdefault("source", str(path))
    return spec_from(Device, given, str(path))


def conventions() -> dict[str, Convention]:
    """The shipped memory conventions by name."""
    return {
        name: spec_from(
            Convention,
            {"name": name, **values, "select": tuple(values["select"])},
            f"conventions.yaml: {name}",
        )
        for name, values in _data("conventions")["conventions"].items()
    }


def convention(name: str, params_dtype: DType = "float32", compute_dtype: DType = "bfloat16") -> Convention:
    """`paper`, or for `mindspore` the profile that the types ask for; any shipped name works too.

    Raises:
        UsageError: no such convention.
    """
    known = conventions()
    if name == "mindspore":
        if compute_dtype == "float32":
            name = "mindspore-fp32"
        else:
            name = "mindspore-a" if params_dtype == "float32" else "mindspore-b"
    if name not in known:
        hint = did_you_mean(name, [*known, "mindspore"]) or f"known: mindspore, {', '.join(known)}"
        raise UsageError(
            f"--memory-convention {name}: {hint}", remedy="use paper or mindspore", id="plan.convention"
        )
    return known[name]


def preset_names() -> list[str]:
    return list(_data("models")["models"])


def preset(name: str) -> ModelSpec:
    """The model of that name.

    Raises:
        UsageError: no such preset; the nearest names are given.
    """
    data = _data("models")
    if name not in data["models"]:
        hint = did_you_mean(name, data["models"]) or f"presets: {', '.join(data['models'])}"
        raise UsageError(
            f"--model {name}: neither a path nor a preset; {hint}",
            remedy="give a preset, a model directory, or a run.yaml",
            id="plan.model",
        )
    entry = spec_from(Preset, data["models"][name], f"models.yaml: {name}")
    return model_from({**data["shapes"][entry.shape], **entry.sizes}, f"models.yaml: {name}")


def model_from(fields: Mapping[str, Any], origin: str) -> ModelSpec:
    """A ModelSpec with the usual defaults for sizes that follow from others (4 h, h / a, a).

    Raises:
        UsageError: a field is missing, unknown or impossible.
    """
    values = dict(fields)
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden > 0:
        values.setdefault("num_query_groups", heads)
        values.setdefault("kv_channels", max(1, hidden // heads))
        values.setdefault("ffn_hidden_size", 4 * hidden)
    spec: ModelSpec = spec_from(ModelSpec, values, origin)
    return spec
