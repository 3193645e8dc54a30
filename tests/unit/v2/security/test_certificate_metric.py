"""The metric of when certificates expire."""

import argparse
import time
from pathlib import Path

import pytest
from tests.certificates import Authority

from weft.v2.server.metrics import CertificateCollector


def test_certificates_among_the_options_are_followed(tmp_path: Path) -> None:
    """Of the service's ports and of its calls, renewed ones too; one that is not there has no sample."""
    authority = Authority(tmp_path)
    own, shown = authority.issue("own", valid_s=3600), authority.issue("shown", valid_s=7200)
    options = argparse.Namespace(
        tls_cert=own.cert,
        tls_key=own.key,
        router_tls_cert=shown.cert,
        model_tls_cert=None,
        gone_tls_cert=tmp_path / "x",
    )
    collector = CertificateCollector(options)

    def left_s() -> dict[str, float]:
        (family,) = collector.collect()
        return {sample.labels["file"]: sample.value - time.time() for sample in family.samples}

    assert left_s() == pytest.approx({str(own.cert): 3600, str(shown.cert): 7200}, abs=60)
    authority.issue("own", valid_s=9000)
    assert left_s()[str(own.cert)] == pytest.approx(9000, abs=60)
