"""Many devices."""
from fretwork.distributed.shards import Shards, shard
__all__ = ["Shards","shard"]
