#!/usr/bin/env python3
"""The `fretwork` command of a wheel: becomes the program inside the package, without importing the package."""

import importlib.util
import os
import sys

spec = importlib.util.find_spec("fretwork")
if spec is None or not spec.submodule_search_locations:
    sys.exit("fretwork: the Python package is not installed for " + sys.executable)
program = os.path.join(spec.submodule_search_locations[0], "bin", "fretwork")
os.execv(program, [program, *sys.argv[1:]])
