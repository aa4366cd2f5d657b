"""The keys of the data: sources, how documents become samples, streams, phases, and what is masked.

Sections are frozen, as in `schema.py`, of which they are a part.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.parts import DataTransformPart
from megaframe.config.registry import Extensible
from megaframe.config.section import Fraction, NonNegative, Positive, Section

Split = tuple[Fraction, Fraction, Fraction]


TextFormat = Literal["auto", "jsonl", "csv", "tsv", "parquet", "text"]
"""How files have texts; `auto`: by the suffix of each."""


TokenName = Annotated[NonNegative | str, Field(union_mode="left_to_right")]


class FillInTheMiddleConfig(Section):
    """Documents whose middle comes last (Bavarian et al. 2022), and the special tokens that say
    so."""

    rate: Fraction = 0.5
    """Share of the documents of training samples that are changed. Validation samples are not."""
    spm_rate: Fraction = 0.5
    """Share of these whose suffix comes before the prefix (SPM); the prefix comes first in the rest
    (PSM)."""
    prefix: TokenName
    """Special token before the prefix: its name in `data.tokenizer`, or its id."""
    suffix: TokenName
    """The same before the suffix."""
    middle: TokenName
    """The same before the middle."""


class DataSourceConfig(Section):
    """A token file or a corpus, and its share of the data."""

    main_key = "path"

    path: str
    """Path of the token files without suffix: PATH.bin and PATH.idx. Or the path or URL of a
    corpus: a file or folder of text (jsonl, CSV, TSV, Parquet, plain text), which is tokenised
    while the run trains, or a folder of token files (docs/guides/streaming.md)."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of samples from this source, relative to the others."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Most passes over the training samples of this source. After them it leaves the blend, and the
    others keep the ratios of their weights. Of a stream, a whole number. Default: no limit."""
    max_tokens: Positive | None = None
    """The same in tokens of its samples."""
    split: Split | None = None
    """The split of this source: [0, 1, 0] only evaluates it, [1, 0, 0] only trains on it. Default:
    `data.split`."""
    key: str = "text"
    """Of a corpus of text: key of a JSON object, or column, that has the text."""
    format: TextFormat = "auto"
    """Of a corpus of text: the format of all its files. `auto`: by the suffix of each."""
    split_blank_lines: bool = False
    """Of a corpus of plain text: a document per paragraph, not per file."""
    where: tuple[str, ...] = ()
    """Of a corpus of text: conditions on the fields of a row, such as [lang=en, score>=0.5], all of
    which hold for the rows that are read."""
    files: tuple[str, ...] = ()
    """Files of a corpus, as names below `path`, where a server cannot list them or only some are
    meant. Empty: all files below `path`."""
    fim: FillInTheMiddleConfig | None = None
    """Fill-in-the-middle: the middle of some documents comes last. Special tokens take the place of
    their last three tokens (docs/guides/shaping.md)."""


class StreamingConfig(Section):
    """How sources are read that are tokenised while the run trains, or lie in many token files."""

    cache: str | None = None
    """Folder of this machine for tokens that are read ahead. Processes of one machine share it, and
    several machines do if it is on a file system of all of them. Default: `cache` in the run
    folder."""
    cache_bytes: Positive = 4 << 30
    """Most bytes of that folder."""
    shuffle_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 64 << 20
    """Bytes of text whose samples are shuffled among each other. The files of a source come in a
    shuffled order, each is read from its beginning, and samples are shuffled within so many bytes
    of it; smaller files are put together until they have so many."""
    workers: Positive | None = None
    """Processes of a machine that tokenise. Default: one for each two cores."""
    skip_broken: bool = False
    """Leave out and count rows that cannot be used, instead of ending the run at the first."""


class PhaseConfig(Section):
    """A part of a run, in which some keys have other values."""

    tokens: Annotated[int, Field(gt=0, le=10**15)]
    """Tokens that it trains on. It ends with the step that reaches them."""
    name: str = ""
    """Its name in messages. Default: its number."""
    overrides: tuple[str, ...] = ()
    """Keys with other values than in the rest of the config, as on a command line:
    [train.seq=32768, model.rotary_base=5e6]. If there are keys of the learning rate (`optim.lr`,
    `min_lr`, `schedule`, `warmup`, `decay`), its schedule runs over this phase alone (`optim.span`)
    instead of the whole run, without warm-up unless they say otherwise."""


class PhasePosition(Section):
    """A phase of a run that has begun."""

    number: Positive = 1
    """Which of `data.phases` it is, from 1."""
    step: NonNegative = 0
    """Steps of the run before it."""
    samples: NonNegative = 0
    """Samples of these steps."""
    end: NonNegative = 0
    """The step of the run that it ends with; 0: not decided."""


class DataConfig(Section):
    """The data, its splits, and what is masked."""

    sources: tuple[DataSourceConfig, ...] = ()
    """Token files and corpora, their weights in the blend and their splits. For example [PATH], or
    [{path: PATH, weight: 0.7}, {path: s3://bucket/texts, weight: 0.3}]."""
    streaming: StreamingConfig = StreamingConfig()
    """How sources are read that are no token files of this machine."""
    split: Split = (0.98, 0.02, 0.0)
    """Shares of each source's documents for training, validation and test, in this order; of its
    tokens if it is a single document, and of each block of `streaming.shuffle_bytes` of a corpus. A
    run never reads the test share; `tools/evaluate.py --split test` evaluates it."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length of the run, in place of `train.steps`: as few steps as have this many times the
    training samples of all sources together. How often each source is seen follows from its weight.
    A resumed run counts what it has seen, also with another batch."""
    phases: tuple[PhaseConfig, ...] = ()
    """Parts of the run, one after the other, each with a length in tokens and values of its own for
    some keys: sources, `train.seq`, rotary base, batch, learning rate, frozen parameters, layout
    (docs/guides/long_context.md#phases). They take the place of `train.steps`. Between two of them
    the run saves a checkpoint and continues from it, with all of its state."""
    phase: PhasePosition | None = None
    """The phase that the run is in. Decided by the run."""
    tokenizer: str | None = None
    """KIND:PATH with KIND sentencepiece, hf or tiktoken, or just `bytes`. The end of a document of
    a tokenizer.json is the `eos_token` of the tokenizer_config.json beside it; hf:PATH?eod=TOKEN
    names another."""
    document_ends: Literal["index", "tokens"] | NonNegative = "index"
    """Where documents end for the next four keys: where the index of the token file says, or, as
    for Megatron's flags, after each token that ends documents: that of `data.tokenizer`
    (`tokens`), or the one with this id."""
    reset_positions: bool = False
    """Restart positions at 0 at the start of each document in a sample."""
    reset_attention: bool = False
    """Restrict attention to tokens of the same document."""
    mask_eod: bool = False
    """Mask the loss of the token after an end of document (the first token of an unrelated
    text)."""
    packing: Literal["none", "best_fit"] = "none"
    """How documents become samples. `none`: end to end, and cut wherever a sample is full.
    `best_fit`: whole, each in the sample where it leaves the least room (Ding et al. 2024), and the
    rest of a sample is padding without labels; only documents longer than a sample are cut. No
    label reaches from one document into another. Needs `reset_attention`."""
    label_weights: bool = True
    """Weigh the loss of each label as the weight file of its source says, if there is one
    (docs/guides/finetuning.md). False counts all labels alike."""
    transforms: tuple[Annotated[DataTransformPart, Extensible("data_transform")], ...] = ()
    """What changes the tokens and labels of each sample of the training split, in this order, after
    `mask_eod`. Samples are changed whole, the same way under any layout and after a resume."""
    prefetch: NonNegative = 2
    """Number of batches that a background thread reads ahead."""

    @property
    def masks_document_starts(self) -> bool:
        """Whether the first token of a document is no label."""
        return self.mask_eod or self.packing != "none"
