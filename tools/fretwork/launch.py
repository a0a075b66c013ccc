#!/usr/bin/env python3
"""The `fretwork` command of a wheel: becomes the program inside the package, without importing the package."""

import importlib.util
import os
import sys

spec = importlib.util.find_spec("fretwork")
if spec is None or not spec.submodule_search_locations:
    sys.exit("fretwork: the Python package is not installed for " + sys.executable)
programs = [os.path.join(folder, "bin", "fretwork") for folder in spec.submodule_search_locations]
program = next((file for file in programs if os.path.exists(file)), None)  # beside the sources, or where it was built
if program is None:
    sys.exit("fretwork: the program is not in " + " or ".join(map(os.path.dirname, programs)))
os.execv(program, [program, *sys.argv[1:]])
