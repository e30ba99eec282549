"""A small server: continuous batching of a random model in Llama's shape over one paged cache.

``workload`` makes requests that come and go; ``scheduler`` decides which tokens of which requests a step computes;
``cache`` owns the pages; ``attention`` has the calls of flashport, which a server may take as they stand; ``model`` is
all else of the network; ``engine`` is the loop; ``check`` serves requests alone and compares bits. ``arrays`` holds
NumPy and torch apart. The command is in ``flashport/cli/demo_serve.py``.
"""
