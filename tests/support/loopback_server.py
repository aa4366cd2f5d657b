"""The beginning, the end and the outages of a server of the tests."""

import threading
import time


class LoopbackServer:
    """A server that a subclass makes in `_start(port)` as `self._server`, and then serves. It has
    a `port`."""

    def _serve(self):
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def stop_for(self, seconds):
        """Close the port, and open it again `seconds` later; return at once."""

        def act():
            self.close()
            time.sleep(seconds)
            self._start(self.port)

        threading.Thread(target=act, daemon=True).start()
