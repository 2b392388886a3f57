"""Where copies of scripts/prolog.d/50-gpuhealth that are older than hooks/ look for the prolog."""

from slurm_gpuhealth.hooks.prolog import main as main
