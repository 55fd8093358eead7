"""A headless Chromium for tests of pages, by chromedriver and the WebDriver protocol; nothing is installed for it.

with browser(folder) as chromium:
    chromium.open("http://127.0.0.1:8000/")
    chromium.type("textarea", "Hello" + ENTER)
    chromium.wait_for("return document.querySelector('.assistant')?.textContent")
"""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request

import pytest

ENTER = "\ue007"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's word for one
ARGUMENTS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


class Browser:
    """A session of chromedriver."""

    def __init__(self, url, folder):
        self.session = f"{url}/session"
        options = {"binary": shutil.which("chromium"), "args": [*ARGUMENTS, f"--user-data-dir={folder}"]}
        given = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.session += f"/{self.call('POST', '', given)['sessionId']}"

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.session + path, data, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["value"]

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def script(self, text, *arguments):
        """What a function with this body returns in the page."""
        return self.call("POST", "/execute/sync", {"script": text, "args": list(arguments)})

    def wait_for(self, text, seconds=600):
        """The first result of such a function that is true."""
        end = time.monotonic() + seconds
        while not (result := self.script(text)):
            assert time.monotonic() < end, f"not in {seconds} s: {text}"
            time.sleep(0.05)
        return result

    def type(self, selector, text):
        element = self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]
        self.call("POST", f"/element/{element}/value", {"text": text})

    def look(self, width, height, scheme):
        """The page as a PNG, in a window of this size, 'light' or 'dark'."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        for command, given in (
            ("Emulation.setEmulatedMedia", {"features": features}),
            ("Emulation.setDeviceMetricsOverride",
             {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}),
        ):  # fmt: skip
            self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": given})
        return base64.b64decode(self.call("GET", "/screenshot"))


@contextlib.contextmanager
def browser(folder):
    """A `Browser` whose profile is in this folder; skips the test where there is no Chromium."""
    if missing := [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]:
        pytest.skip(f"no {' and no '.join(missing)} here")
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        lines = iter(driver.stdout.readline, "")
        port = next(filter(None, (re.search(r"successfully on port (\d+)", line) for line in lines)))[1]
        chromium = Browser(f"http://127.0.0.1:{port}", folder)
        try:
            yield chromium
        finally:
            chromium.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(30)
        driver.stdout.close()
