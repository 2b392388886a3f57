"""Where copies of scripts/epilog.d/50-gpuhealth that are older than hooks/ look for the epilog."""

from slurm_gpuhealth.hooks.epilog import main as main
