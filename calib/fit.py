"""Calibrate a model for the 2-bit KV cache; `python calib/fit.py --help` lists the options.

The same command as `novakv fit`.
"""

import sys

from vllm_novakv.calibration.command import main

if __name__ == "__main__":
    sys.exit(main(prog="calib/fit.py"))
