"""One file a process, as pytest-xdist's `loadfile`, but a test that ends its process fails once and the others go on.

xdist's own scheduling hands the same test to one new process after the other, and waits for ever for files that were
done already.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling


class SurvivingScheduling(LoadFileScheduling):
    """What `--dist loadfile` stands for in this repository; see conftest.py."""

    def remove_node(self, node: Any) -> str | None:
        """The test that the ended process was in, or None; what it had not begun goes to other processes."""
        files = self.assigned_work.pop(node)
        crashed = next((test for tests in files.values() for test, is_done in tests.items() if not is_done), None)
        if crashed is None:
            return None
        files[self._split_scope(crashed)][crashed] = True
        self.workqueue.update({name: tests for name, tests in files.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return crashed
