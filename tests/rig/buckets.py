"""Buckets in S3's words on this machine: moto's server on loopback.  Nothing outside is asked, nobody's keys are read.

with Buckets() as buckets:
    url = buckets.new()             # s3://bucket-1
    os.environ | buckets.environ    # with this, s3fs and boto3 find it
    buckets.faults.plan = lambda method, path: "cut" if method == "PUT" else ""
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

REGION, KEY, SECRET = "us-east-1", "somebody", "a-secret"


class Faults:
    """Between the clients and S3: what becomes of each request.

    busy        503, and nothing was done            cut      half of it is read, then the line is gone
    unanswered  it was done, then the line is gone   broken   it was done, and the answer is 500
    denied      403, and nothing was done
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self.plan: Callable[[str, str], str] = lambda method, path: ""  # one of them, or empty for none

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        fault = self.plan(environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}")
        if not fault:
            return self._app(environ, start)
        size_bytes = int(environ.get("CONTENT_LENGTH") or 0)
        if fault in ("unanswered", "broken"):
            for _ in self._app(environ, lambda *_: None):
                pass
        else:
            environ["wsgi.input"].read(size_bytes // 2 if fault == "cut" else size_bytes)
        if fault in ("unanswered", "cut"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        codes = {"busy": "503 SlowDown", "denied": "403 AccessDenied"}
        code = codes.get(fault, "500 InternalError")
        start(code, [("Content-Type", "application/xml"), ("Connection", "close")])
        return [f"<Error><Code>{code.partition(' ')[2]}</Code><Message>a fault</Message></Error>".encode()]


class Buckets:
    def __enter__(self) -> Buckets:
        logging.getLogger("werkzeug").setLevel(
            logging.CRITICAL
        )  # a line for each request, and for each fault
        self.faults = Faults(DomainDispatcherApplication(create_backend_app))
        self._server = make_server(
            "127.0.0.1", 0, self.faults, threaded=True, request_handler=MotoRequestHandler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        # Looks at buckets without the library that farflung writes through.
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
        )
        self._numbers = itertools.count(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def new(self) -> str:
        """The URL of an empty bucket."""
        name = f"bucket-{next(self._numbers)}"
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def publish(self, files: Mapping[str, bytes]) -> str:
        """The URL of a bucket with these, that anybody may list and read."""
        url = self.new()
        self.client.put_bucket_acl(Bucket=bucket_of(url), ACL="public-read")
        for name, content in files.items():
            self.client.put_object(Bucket=bucket_of(url), Key=name, Body=content, ACL="public-read")
        return url

    def sizes(self, url: str) -> dict[str, int]:
        """What is finished in the bucket of this URL."""
        found = self.client.list_objects_v2(Bucket=bucket_of(url)).get("Contents", [])
        return {each["Key"]: each["Size"] for each in found}

    def begun(self, url: str) -> list[str]:
        """What is being uploaded to the bucket of this URL, and is paid for."""
        found = self.client.list_multipart_uploads(Bucket=bucket_of(url)).get("Uploads", [])
        return [each["Key"] for each in found]


def bucket_of(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[0]
