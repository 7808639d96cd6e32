"""Buckets in S3's words on this machine: moto's server on loopback.  Nothing outside is asked, nobody's keys are read.

with Buckets() as buckets:
    url = buckets.new()             # s3://bucket-1
    os.environ | buckets.environ    # with this, s3fs and boto3 find it
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

REGION, KEY, SECRET = "us-east-1", "somebody", "a-secret"


class Buckets:
    def __enter__(self) -> Buckets:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
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
        self._server.stop()

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
