"""Megatron-LM's flags become a config that means the same, loads, and can be planned.

Tests `megaframe.migration.megatron_training`.
"""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import RunConfig, load
from megaframe.config.keys import get_config_keys
from megaframe.config.megatron_settings import KEYS, WITHOUT_KEY
from megaframe.migration.config_text import format_config
from megaframe.migration.conversion import (
    ALWAYS_SO,
    DECIDE,
    HEADINGS,
    NO_EFFECT,
    REFUSED,
    UNKNOWN,
    WITHOUT,
)
from megaframe.migration.megatron import migrate_megatron

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 99 "
    "--micro-batch-size 2 --global-batch-size 16 --train-iters 100 --lr 1e-3 "
)
GPT3 = """\
#!/bin/bash
#SBATCH --nodes=128
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=${SLURM_NNODES:-128}      # of eight
CKPT=${1:-/ckpt/gpt3}; DATA=$2

LAUNCH="torchrun --nproc_per_node 8 --nnodes $NODES --rdzv_endpoint $(hostname):29500"
GPT_ARGS="--num-layers 96 --hidden-size 12288 --num-attention-heads 96 \\
          --seq-length 2048 --max-position-embeddings 2048 --init-method-std 0.006"
TRAIN_ARGS=(
    --micro-batch-size 1 --global-batch-size 1536
    --rampup-batch-size 128 128 5859375   # samples
    --train-samples 146484375
    --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
    --lr-decay-samples 126953125 --lr-warmup-samples 183105
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --hidden-dropout 0 --attention-dropout 0
    --bf16 --use-flash-attn --num-workers 2
)
MODEL_PARALLEL="--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \\
    --num-layers-per-virtual-pipeline-stage 3 --sequence-parallel --use-distributed-optimizer"
$LAUNCH pretrain_gpt.py $GPT_ARGS "${TRAIN_ARGS[@]}" $MODEL_PARALLEL \\
    --data-path 0.7 $DATA/web_text 0.3 $DATA/books_text --split 969,30,1 \\
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \\
    --save $CKPT --load $CKPT --save-interval 1000 --eval-interval 500 --eval-iters 4 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
LLAMA = """\
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --seq-length 8192 --max-position-embeddings 8192 --make-vocab-size-divisible-by 128
)
FP8=${FP8:-1}
if [[ "$FP8" == 1 ]]; then MODEL_ARGS+=( "--fp8-format hybrid" --fp8-recipe blockwise ); fi
torchrun --nproc-per-node=8 pretrain_gpt.py ${MODEL_ARGS[@]} --bf16 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model $TOKENIZER --vocab-size 128256 \\
    --micro-batch-size 1 --global-batch-size 128 --train-iters 10000 --lr 3e-4 --min-lr 3e-6 \\
    --lr-warmup-fraction 0.01 --lr-decay-style cosine --adam-beta2 0.95 --weight-decay 0.1 \\
    --tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a \\
    --use-distributed-optimizer --grad-reduce-in-bf16 --decoupled-lr 6e-4 --mock-data
"""
MIXTRAL = """\
python -m torch.distributed.run --nproc_per_node 8 --nnodes 4 pretrain_gpt.py \\
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 8 --seq-length 4096 --position-embedding-type rope \\
    --max-position-embeddings 32768 --rotary-base 1000000 --normalization RMSNorm --swiglu \\
    --disable-bias-linear --untie-embeddings-and-output-weights --no-position-embedding \\
    --attention-dropout 0.0 --hidden-dropout 0.0 --vocab-size 32000 --bf16 \\
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss \\
    --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall \\
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 \\
    --expert-model-parallel-size 8 --use-distributed-optimizer --overlap-grad-reduce \\
    --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --min-lr 1e-5 --train-iters 500000 \\
    --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 0.1 --lr-warmup-iters 500 \\
    --data-path /data/a_text_document --tokenizer-type Llama2Tokenizer --tokenizer-model t.model
"""


def migrate(script, tmp_path, **given_variables):
    """Return the conversion of a script, and the config that its YAML makes."""
    conversion = migrate_megatron(script, given_variables)
    config = conversion.validate()
    path = tmp_path / "config.yaml"
    path.write_text(format_config(conversion, "args.sh"), encoding="utf-8")
    assert load(str(path)) == config
    return conversion, config


def convert(words, tmp_path, base=BASE):
    """Return the notes, and the values of keys that differ from what `base` alone has."""
    conversion, _ = migrate(base + words, tmp_path)
    before = migrate_megatron(base, {}).keys
    changed = {k: v for k, (v, _) in conversion.keys.items() if before.get(k, (None,))[0] != v}
    return conversion.notes, changed


def test_a_gpt3_script(tmp_path):
    conversion, config = migrate(GPT3, tmp_path, DATA="/data")
    model, parallel, train, optim = config.model, config.parallel, config.train, config.optim
    assert (model.layers, model.hidden, model.heads, model.ffn) == (96, 12288, 96, 49152)
    assert model.bias and model.tie_embeddings and model.dropout == 0 and model.vocab == 50257
    assert (model.position, model.positions, model.activation) == ("learned", 2048, "gelu_tanh")
    assert (parallel.tensor, parallel.pipeline, parallel.chunks, parallel.zero) == (8, 16, 2, 1)
    assert conversion.world == 1024
    ramp = train.batch_ramp
    assert (ramp.start, ramp.increment, ramp.samples) == (128, 128, 5859375)
    assert count_samples(train, train.steps) <= 146484375 < count_samples(train, train.steps + 1)
    assert count_samples(train, optim.decay) <= 126953125 < count_samples(train, optim.decay + 1)
    assert count_samples(train, optim.warmup) <= 183105 < count_samples(train, optim.warmup + 1)
    sources = [(source.path, source.weight) for source in config.data.sources]
    assert sources == [("/data/web_text", 0.7), ("/data/books_text", 0.3)]
    assert config.data.split == (0.969, 0.03, 0.001) and train.eval_samples == 4 * 1536
    assert (config.checkpoint.folder, config.checkpoint.resume) == ("/ckpt/gpt3", "latest")
    assert train.recompute == "full" and train.precision == "bf16"
    assert conversion.notes[DECIDE] == conversion.notes[REFUSED] == conversion.notes[UNKNOWN] == []
    assert any(note.startswith("--use-flash-attn: ") for note in conversion.notes[WITHOUT])


def test_a_step_within_a_ramp_that_samples_do_not_fill_is_none(tmp_path):
    script = GPT3.replace("--rampup-batch-size 128 128 5859375", "--rampup-batch-size 16 4 5383")
    script = re.sub(r"--global-batch-size \S+", "--global-batch-size 416", script)
    script = re.sub(r"--train-samples \S+", "--train-samples 4616", script)
    train = migrate(script, tmp_path, DATA="/data")[1].train
    assert train.global_batch == 416 and train.batch_ramp.increment == 4
    assert count_samples(train, train.steps) <= 4616 < count_samples(train, train.steps + 1)


def count_samples(train, steps):
    """Return the samples of the first steps, one step after the other as the ramp rises."""
    ramp, samples, step = train.batch_ramp, 0, 0
    rises = (train.global_batch - ramp.start) // ramp.increment
    while step < steps and samples < ramp.samples:
        samples += ramp.start + samples * rises // ramp.samples * ramp.increment
        step += 1
    return samples + (steps - step) * train.global_batch


def test_a_llama3_script(tmp_path):
    conversion, config = migrate(LLAMA, tmp_path)
    shipped = load("llama3-8b")
    assert config.model == shipped.model.model_copy(update={"head_dim": 128})
    parallel, train, optim = config.parallel, config.train, config.optim
    assert (parallel.tensor, parallel.context, parallel.context_kind) == (2, 2, "all_to_all")
    assert (parallel.reduce_precision, train.fp8, optim.warmup) == ("bf16", "block", 100)
    assert optim.groups.head.lr == optim.groups.embedding.lr == 2.0
    assert config.checkpoint.every == 0 and config.train.eval_every == 0
    text = format_config(conversion, "llama.sh")
    assert "--tokenizer-model $TOKENIZER: its value is not in the file; data.tokenizer" in text
    assert config.data.sources == () and config.data.tokenizer is None


def test_a_mixtral_script(tmp_path):
    conversion, config = migrate(MIXTRAL, tmp_path)
    model, shipped = config.model, load("mixtral-8x7b").model
    experts = {"balance": "global", "balance_loss": 0.01}
    assert model.moe == shipped.moe.model_copy(update=experts)
    assert model == shipped.model_copy(update={"moe": model.moe})
    assert (config.parallel.expert, config.parallel.pipeline) == (8, 4)
    assert (config.optim.warmup, config.optim.decay, config.optim.beta2) == (500, 320000, 0.999)
    assert config.data.tokenizer == "sentencepiece:t.model"
    assert conversion.notes[DECIDE] == []


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("--swiglu", {"model.activation": "swiglu", "model.ffn": 128}),
        ("--swiglu --ffn-hidden-size 96", {"model.activation": "swiglu", "model.ffn": 96}),
        ("--disable-bias-linear", {"model.bias": None, "model.activation": "gelu"}),
        ("--no-bias-gelu-fusion", {"model.activation": "gelu"}),
        ("--normalization RMSNorm", {"model.norm": "rmsnorm"}),
        ("--num-query-groups 2", {}),
        ("--group-query-attention --num-query-groups 2", {"model.kv_heads": 2}),
        ("--position-embedding-type none", {"model.position": "none"}),
        ("--use-rope-scaling --position-embedding-type rope",
         {"model.position": "rotary", "model.rotary_scaling.kind": "llama3",
          "model.rotary_scaling.factor": 8.0}),
        ("--window-size 31,0", {"model.window": 32}),
        ("--window-size '(31,0)' --window-attn-skip-freq 4", {"model.window": [32, 32, 32, None]}),
        ("--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2",
         {"parallel.chunks": 2, "parallel.pipeline": 2}),
        ("--use-distributed-optimizer", {"parallel.zero": None}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
         {"parallel.zero": 2}),
        ("--bf16", {"train.precision": "bf16"}),
        ("--lr-warmup-iters 5 --lr-decay-iters 90", {"optim.warmup": 5, "optim.decay": 90}),
        ("--lr-warmup-fraction .1 --lr-decay-iters 90", {"optim.warmup": 9, "optim.decay": 90}),
        ("--lr-decay-style constant --lr-decay-iters 90", {"optim.schedule": "constant"}),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 20",
         {"optim.schedule": "wsd", "optim.decay": 20}),
        ("--lr-decay-style inverse-square-root", {"optim.schedule": "inverse_sqrt"}),
        ("--train-samples 200", {}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
         {"train.recompute_blocks": 2}),
        ("--recompute-activations", {"train.recompute": "selective"}),
        ("--fp8-format hybrid --fp8-recipe tensorwise", {"train.fp8": "tensor"}),
        ("--clip-grad 0 --weight-decay 0", {"optim.clip": 0, "optim.weight_decay": 0}),
        ("--data-path a b", {"data.sources": [{"path": "a"}, {"path": "b"}]}),
        ("--data-path 1 a", {"data.sources": [{"path": "a"}]}),
        ("--train-data-path a --valid-data-path b",
         {"data.sources": [{"path": "a", "split": [1.0, 0.0, 0.0]},
                           {"path": "b", "split": [0.0, 1.0, 0.0]}]}),
        ("--split 99990,8,2", {"data.split": [0.9999, 8e-05, 2e-05]}),
        ("--tokenizer-type NullTokenizer", {"model.vocab": 100}),
        ("--eval-interval 10 --eval-iters 3", {"train.eval_every": 10, "train.eval_samples": 48}),
        ("--save c", {"checkpoint.folder": "c", "checkpoint.every": 100}),
        ("--save c --load c --save-interval 7",
         {"checkpoint.folder": "c", "checkpoint.every": 7, "checkpoint.resume": "latest"}),
        ("--load elsewhere", {}),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", {"optim.state": "bf16"}),
        ("--optimizer muon --muon-momentum 0.9",
         {"optim.name": "muon", "optim.momentum": 0.9, "optim.nesterov": False}),
        ("--distributed-timeout-minutes 5", {"parallel.timeout": 300}),
        ("--profile --profile-step-start 4 --profile-step-end 6", {"metrics.profile": [4, 5]}),
        ("--num-experts 4 --moe-layer-freq 2 --moe-router-topk 1 --moe-router-pre-softmax "
         "--tensor-model-parallel-size 2",
         {"model.moe.experts": 4, "model.moe.top_k": 1, "model.moe.score": "softmax",
          "model.moe.normalise": False, "model.moe.balance": "none", "parallel.tensor": 2,
          "parallel.expert_tensor": 2,
          "model.blocks": [{"repeat": 1, "feed_forward": "moe"},
                           {"repeat": 1, "feed_forward": "mlp"}]}),
        ("--num-experts 4 --moe-layer-freq [0]+[1]*3 --moe-router-score-function sigmoid "
         "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
         "--moe-aux-loss-coeff 1e-4 --moe-router-num-groups 2 --moe-router-group-topk 1 "
         "--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 64",
         {"model.moe.experts": 4, "model.moe.score": "sigmoid",
          "model.moe.first": 1, "model.moe.every": 1, "model.moe.balance": "bias",
          "model.moe.balance_loss": 1e-4, "model.moe.groups": 2, "model.moe.top_groups": 1,
          "model.moe.group_best": 2, "model.moe.ffn": 32, "model.moe.shared": 2}),
        ("--multi-latent-attention --kv-lora-rank 16 --qk-layernorm --rotary-scaling-factor 40 "
         "--mscale-all-dim 1.0",
         {"model.latent.kv_rank": 16, "model.latent.head_dim": 128, "model.latent.rotary_dim": 64,
          "model.latent.value_dim": 128, "model.rotary_scaling.kind": "yarn",
          "model.rotary_scaling.factor": 40, "model.rotary_scaling.original_length": 4096,
          "model.rotary_scaling.high_frequency": 32.0,
          "model.rotary_scaling.mscale_all_dim": 1.0}),
        ("--adam-beta1 0.8 --adam-eps 1e-6 --seed 7 --init-method-std 0.01 --log-interval 5",
         {"optim.beta1": 0.8, "optim.eps": 1e-6, "run.seed": 7, "model.init_std": 0.01,
          "metrics.every": 5}),
    ],
)  # fmt: skip
def test_what_flags_mean(words, keys, tmp_path):
    """None is a key of the base that is gone, because its value is then our default."""
    notes, changed = convert(words, tmp_path)
    gone = {key for key, value in keys.items() if value is None}
    assert changed == {key: value for key, value in keys.items() if value is not None}, notes
    assert not gone & {*migrate_megatron(BASE + words, {}).keys}


def test_defaults_that_differ_are_written_out(tmp_path):
    _, config = migrate(BASE, tmp_path)
    assert (config.optim.beta2, config.optim.weight_decay) == (0.999, 0.01)
    assert (config.optim.schedule, config.model.dropout) == ("linear", 0.1)
    assert config.model.bias and config.model.tie_embeddings and config.model.position == "learned"
    assert (config.train.precision, config.parallel.zero) == ("fp32", 0)


SAMPLES = {"optimizer": "adam", "normalization": "RMSNorm", "lr_decay_style": "cosine"}


def test_no_flag_goes_unsaid():
    """Each flag of the table is the source of a key, or in a note, whatever its value."""
    values = ("", " 1", None, " $UNKNOWN")
    for name, value in itertools.product([*KEYS, *WITHOUT_KEY], values):
        flag = f"--{name.replace('_', '-')}"
        written = f"{flag} {SAMPLES.get(name, 'x')}" if value is None else f"{flag}{value}"
        conversion = migrate_megatron(f"{BASE} {written}", {})
        conversion.validate()
        origins = [origin for _, origin in conversion.keys.values()]
        notes = [note for notes in conversion.notes.values() for note in notes]
        assert any(flag in text for text in [*origins, *notes]), written


def test_what_is_refused_is_said_with_its_flag_and_the_rest_loads(tmp_path):
    words = "--num-layers 0 --hidden-size many --lr -1 --cp-comm-type x --num-attention-heads 3"
    conversion, config = migrate(BASE + words, tmp_path)
    refused = "\n".join(conversion.notes[REFUSED])
    assert "--num-layers 0: not a whole number above 0" in refused
    assert "--hidden-size many: not a number" in refused
    assert "--lr -1: optim.lr=-1: takes a number > 0" in refused
    assert "--cp-comm-type x: parallel.context_kind=x: takes one of ring" in refused
    assert config.optim.lr == RunConfig().optim.lr
    assert conversion.get_value("model.layers") is None


def test_what_does_not_fit_together_is_said_with_its_flags(tmp_path):
    conversion, _ = migrate(BASE + "--tensor-model-parallel-size 3 --global-batch-size 7", tmp_path)
    notes = "\n".join(conversion.notes[DECIDE])
    assert "train.global_batch=7" in notes and "(from --global-batch-size 7" in notes


def test_comments_stay_comments(tmp_path):
    """Whatever a script has in its words, no line of the YAML is more than it says."""
    words = "'--evil\nrun: {seed: 5}' --foo $'a\\n  b' --data-path 'x # y: z' --bar '\u2028seed: 9'"
    conversion, config = migrate(f"python t.py {BASE} {words}", tmp_path)
    assert config.run.seed == RunConfig().run.seed
    assert config.data.sources[0].path == "x # y: z"
    text = format_config(conversion, "a\nb.sh")
    keys = {key.partition(".")[0] for key in conversion.keys}
    for line in text.splitlines():
        assert line.lstrip()[:1] == "#" or line.partition(":")[0].strip() in keys | {
            key.rpartition(".")[2] for key in conversion.keys
        } | {part for key in conversion.keys for part in key.split(".")}
    assert max(map(len, text.splitlines())) < 1000


MODELS = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 8),
        "heads": st.sampled_from([1, 2, 4]),
        "kv_heads": st.sampled_from([None, 1]),
        "hidden": st.sampled_from([32, 64]),
        "head_dim": st.sampled_from([None, 16]),
        "ffn": st.integers(1, 200),
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "norm_eps": st.sampled_from([1e-5, 1e-6]),
        "position": st.sampled_from(["rotary", "learned", "none"]),
        "rotary_base": st.sampled_from([1e4, 5e5]),
        "activation": st.sampled_from(["swiglu", "relu2", "gelu"]),
        "tie_embeddings": st.booleans(),
        "qk_norm": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.25]),
        "moe": st.none()
        | st.fixed_dictionaries(
            {
                "experts": st.sampled_from([4, 8]),
                "top_k": st.integers(1, 4),
                "ffn": st.integers(1, 64),
                "first": st.integers(0, 3),
                "score": st.sampled_from(["softmax", "sigmoid"]),
                "scale": st.sampled_from([1.0, 2.5]),
                "balance": st.sampled_from(["none", "bias"]),
                "balance_loss": st.just(0.0),
            }
        ),
    }
)
PARALLEL = st.fixed_dictionaries(
    {
        "tensor": st.sampled_from([1, 2, 4]),
        "context": st.sampled_from([1, 2]),
        "pipeline": st.sampled_from([1, 2]),
        "zero": st.sampled_from([0, 1, 3]),
        "context_kind": st.sampled_from(["ring", "all_to_all"]),
        "reduce_precision": st.sampled_from(["master", "bf16"]),
    }
)


def print_flags(config):
    """Return the arguments of Megatron-LM that mean a config's model and layout."""
    model, parallel = config.model, config.parallel
    yield f"--num-layers {model.layers} --hidden-size {model.hidden}"
    yield f"--num-attention-heads {model.heads} --ffn-hidden-size {model.ffn}"
    yield f"--group-query-attention --num-query-groups {model.kv_heads}"
    yield f"--kv-channels {model.head_dim} --norm-epsilon {model.norm_eps}"
    yield f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}"
    positions = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}
    yield f"--position-embedding-type {positions[model.position]}"
    yield f"--max-position-embeddings {config.train.seq} --rotary-base {model.rotary_base:.0f}"
    yield {"swiglu": "--swiglu", "relu2": "--squared-relu", "gelu": ""}[model.activation]
    yield "--disable-bias-linear"
    yield "" if model.tie_embeddings else "--untie-embeddings-and-output-weights"
    yield "--qk-layernorm" if model.qk_norm else ""
    yield f"--hidden-dropout {model.dropout}"
    if model.moe:
        moe = model.moe
        yield f"--num-experts {moe.experts} --moe-router-topk {moe.top_k}"
        yield f"--moe-ffn-hidden-size {moe.ffn} --moe-router-score-function {moe.score}"
        yield f"--moe-layer-freq [0]*{moe.first}+[1]*{model.layers - moe.first}"
        yield f"--moe-router-topk-scaling-factor {moe.scale} --expert-tensor-parallel-size 1"
        yield "--moe-router-enable-expert-bias" if moe.balance == "bias" else ""
    yield f"--tensor-model-parallel-size {parallel.tensor}"
    yield f"--context-parallel-size {parallel.context} --cp-comm-type"
    yield "p2p" if parallel.context_kind == "ring" else "a2a"
    yield f"--pipeline-model-parallel-size {parallel.pipeline}"
    yield {0: "", 1: "--use-distributed-optimizer", 3: "--use-torch-fsdp2"}[parallel.zero]
    yield "--grad-reduce-in-bf16" if parallel.reduce_precision == "bf16" else ""


@given(MODELS, PARALLEL)
def test_a_config_as_flags_comes_back_as_the_same_model_and_layout(model, parallel):
    model = {key: value for key, value in model.items() if value is not None}
    if "moe" in model:
        moe = model["moe"]
        model["layers"] = max(model["layers"], moe["first"] + 1)
        model["moe"] = {**moe, "normalise": moe["score"] == "softmax" or moe["top_k"] > 1}
    if model["position"] == "learned":
        model["positions"] = 32
    if model["position"] != "rotary":
        model["rotary_base"] = 1e4
    config = RunConfig.model_validate({"model": {**model, "vocab": 99}, "parallel": parallel})
    config = config.model_copy(update={"train": config.train.model_copy(update={"seq": 32})})
    conversion = migrate_megatron(f"{BASE} {' '.join(print_flags(config))}", {})
    migrated = conversion.validate()
    assert migrated.model == config.model
    assert migrated.parallel == config.parallel
    assert conversion.notes[REFUSED] == conversion.notes[UNKNOWN] == []


def test_headings_and_keys_are_those_that_exist():
    conversion = migrate_megatron(BASE, {})
    assert {*conversion.notes} == {*HEADINGS} and {ALWAYS_SO, NO_EFFECT} <= {*HEADINGS}
    assert {*conversion.keys} <= {*get_config_keys()}
