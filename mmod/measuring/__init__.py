"""What did it cost, lose, look at?"""

from mmod.measuring.trace import Trace, trace

__all__ = ["Trace", "trace"]
