"""The GPU of Apple silicon, through system_profiler. It uses the machine's memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from gpunb.accelerators import probing
from gpunb.accelerators.base import Accelerator, DetectionError
from gpunb.scheduler.resources import Device


class Apple(Accelerator):
    """The one GPU of a Mac. No environment variable can hide it."""

    name: ClassVar[str] = "apple"

    def devices(self) -> Sequence[Device]:
        if sys.platform != "darwin":
            self.notes = ("no Apple GPU: this is not macOS",)
            return ()
        try:
            answer = probing.ask_json("system_profiler", "SPDisplaysDataType", "-json")
        except probing.ProbeError as error:
            raise DetectionError(f"Apple's GPU cannot be looked for: {error}") from error
        for each in answer.get("SPDisplaysDataType", ()):
            model = str(each.get("sppci_model", ""))
            if model.startswith("Apple "):
                return [
                    Device(
                        key="apple:0",
                        id=0,
                        name=model,
                        type="-".join(model.split()[1:]) or "Apple-Silicon",
                        vendor=self.name,
                    )
                ]
        self.notes = ("no Apple GPU: this Mac has none of Apple's own",)
        return ()
