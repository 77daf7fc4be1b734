"""Tests that need PyTorch (`make test-bench`). Where there is none, these files are not even imported.

The folder is not called torch: `tests` is on the import path, and `import torch` would find it where PyTorch is not.
"""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
