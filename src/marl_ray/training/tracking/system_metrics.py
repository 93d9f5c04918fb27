"""Sample the CPU, memory and GPU use of a worker's machine at intervals."""

import time

import psutil
import torch

EVERY_S = 10.0
"""Seconds between two readings."""
GIB = 2.0**30
"""Bytes of a gibibyte."""


class SystemMetrics:
    """Samples the metrics of this machine and of this process."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.next_read_at = 0.0
        """Time of the next reading, by the monotonic clock; 0 before the first."""
        psutil.cpu_percent()  # psutil measures from this first call on
        self.process.cpu_percent()

    def read(self) -> dict[str, float]:
        """Return metrics `system/...`, in percent and GiB; none within EVERY_S seconds of the last reading."""
        if time.monotonic() < self.next_read_at:
            return {}
        self.next_read_at = time.monotonic() + EVERY_S
        memory = psutil.virtual_memory()
        metrics = {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_gib": (memory.total - memory.available) / GIB,
            "system/process_cpu_percent": self.process.cpu_percent(),  # 200 on two full cores
            "system/process_memory_gib": self.process.memory_info().rss / GIB,
        }
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            metrics["system/gpu_memory_gib"] = (total - free) / GIB
            metrics["system/gpu_memory_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        return metrics
