"""A headless Chromium, driven over a pipe by the DevTools protocol; nothing but the standard library."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars")


def find():
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab of a browser.

    Args:
        path: Path of the browser.
    """

    def __init__(self, path):
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [path, *OPTIONS, f"--user-data-dir={self._folder.name}"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []  # the sandbox refuses root
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (commands, answers)]
        actions = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends, 3)]  # where it looks
        actions.append((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0))
        self._pid = os.posix_spawn(path, command, os.environ, file_actions=actions)
        for end in (commands, answers, *ends):
            os.close(end)
        self._ids, self._buffer, self._session = itertools.count(1), b"", None
        self.complaints = []
        """Messages of the page's console and of its content security policy."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, timeout=120, **params):
        """The result of one command."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **({"sessionId": self._session} if self._session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(timeout)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self, timeout):
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], timeout)[0], "the browser does not answer"
            read = os.read(self._read, 1 << 16)
            assert read, "the browser has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(line)
        if answer.get("method") == "Runtime.exceptionThrown":
            details = answer["params"]["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["source"] != "network":
            self.complaints.append(answer["params"]["entry"]["text"])
        return answer

    def size(self, width, height, theme="light", scale=1):
        """Sets the size of the window and the system's preferences."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def open(self, url):
        """Loads a page without its stored settings and conversation."""
        self._go(f"{url}/page/icon.svg")  # of the same origin, and without a script that would store anything
        self.js("sessionStorage.clear()")
        self.complaints.clear()
        self.call("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self._go(url)

    def reload(self):
        """Loads the page again with its stored data."""
        self._leave("Page.reload")

    def _go(self, url):
        self._leave("Page.navigate", url=url)

    def _leave(self, method, **how):
        self.js("window.isLeft = true")
        self.call(method, **how)
        self.wait("!window.isLeft && document.readyState === 'complete'")

    def js(self, expression):
        """The value of an expression, awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression, seconds=60):
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"not so after {seconds} s: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.03)

    def text(self, selector):
        """Visible text of the last element that matches a selector; "" if there is none."""
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.innerText ?? ''")

    def click(self, selector):
        """Clicks in the middle of the first element that a selector finds."""
        box = self.js(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                      "return {x: r.x + r.width / 2, y: r.y + r.height / 2} })()")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def type(self, text):
        """Types text into the focused element."""
        self.call("Input.insertText", text=text)

    def key(self, name, **more):
        """Presses one key."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37}[name]
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, windowsVirtualKeyCode=code, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, windowsVirtualKeyCode=code, **more)

    def screenshot(self, path):
        """A picture of the window."""
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        """Ends the browser."""
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()
