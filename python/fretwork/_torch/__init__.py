"""What torch needs beyond the ops themselves. `<family>.py` has a family's rules: result shapes for tracing, gradients,
vmap and autocast. The public functions are in `fretwork/<family>.py`."""
