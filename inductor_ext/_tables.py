"""One of our values in one of PyTorch's tables, and the lock under which they change."""

from __future__ import annotations

import threading
from typing import Any

LOCK = threading.RLock()
ABSENT: Any = object()


class Entry:
    """One of our values in one of PyTorch's dicts, and what stood there before."""

    def __init__(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self.table, self.key, self.value = table, key, value
        self.before = table.get(key, ABSENT)
        table[key] = value

    def remove(self) -> None:
        """Put back what stood there, unless somebody else has replaced our value."""
        if self.table.get(self.key) is self.value:
            if self.before is ABSENT:
                del self.table[self.key]
            else:
                self.table[self.key] = self.before
