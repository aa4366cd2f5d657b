"""Names of the files in a run folder, which dashboards and resumed runs read."""

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
LOG_FILE = "run.log"
SAMPLES_FILE = "samples.jsonl"
"""One object per line: `step`, `prompt`, and the `text` that the model wrote after it."""
WANDB_ID_FILE = "wandb.id"
