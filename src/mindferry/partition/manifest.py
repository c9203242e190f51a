"""partition.json: what a cut checkpoint is a cut of, so that a merge can be checked against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindferry.errors import MindferryError
from mindferry.partition.layout import MAX_RANKS, Grid
from mindferry.spec import ModelSpec
from mindferry.weights.header import no_duplicates

NAME = "partition.json"
MAX_BYTES = 1 << 28
Degree = Field(gt=0, le=MAX_RANKS)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Degrees(_Closed):
    """A Grid."""

    data_parallel: int = Degree
    model_parallel: int = Degree
    pipeline_stage: int = Degree

    def grid(self) -> Grid:
        return Grid(self.data_parallel, self.model_parallel, self.pipeline_stage)


class Tensor(_Closed):
    """One tensor of the whole checkpoint.

    Attributes:
        shape: of the whole tensor, in elements.
        dim: the dimension that tensor parallel cuts; None for whole tensors.
        stages: pipeline stages that hold it.
        sha256: of the bytes of each share, tensor-parallel rank 0 first; one where it is whole.
    """

    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    stages: tuple[int, ...]
    sha256: tuple[str, ...]


class Manifest(_Closed):
    """The file.

    Attributes:
        vocab_rows: rows of the word table and the head as cut; above model.vocab_size where they were padded.
        layers: of each stage.
        offset, pp_interleave_num: what model_config says so that mindformers places the layers like that.
        file_suffix: "{epoch}_{step}" of the rank files.
        prefix: their beginning.
        state: state.json of the checkpoint of a run, None for weights alone.
        added: scalars that the whole checkpoint does not have, and mindformers' resume needs.
    """

    format: Literal[1] = 1
    mindferry: str
    grid: Degrees
    model: ModelSpec
    use_contiguous_weight_layout_attention: bool
    use_interleaved_weight_layout_mlp: bool
    vocab_rows: int = Field(gt=0)
    layers: tuple[tuple[int, ...], ...]
    offset: Any
    pp_interleave_num: int = Field(gt=0)
    prefix: str
    file_suffix: str
    state: dict[str, Any] | None
    added: tuple[str, ...]
    tensors: dict[str, Tensor]


def read(path: Path) -> Manifest:
    """The manifest at `path`.

    Raises:
        MindferryError: not a manifest, or a damaged one.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        return Manifest.model_validate(
            json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
        )
    except (OSError, ValueError, RecursionError) as err:
        what = str(err)
        if isinstance(err, ValidationError):
            first = err.errors()[0]
            what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise MindferryError(
            f"{path}: cannot be read: {what}",
            remedy="cut the checkpoint again; without the file, --config and --from say what it said",
            id="partition.manifest",
        ) from None
