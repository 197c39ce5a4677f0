"""The routers' configurations in deploy/: their programs accept them where installed, and what they name exists."""
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

DEPLOY = ROOT / "deploy"


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)


def documents(path):
    yaml = pytest.importorskip("yaml")
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_haproxy():
    if not shutil.which("haproxy"):
        pytest.skip("skip: haproxy is not installed")
    r = run("haproxy", "-c", "-f", DEPLOY / "haproxy.cfg")
    assert r.returncode == 0, r.stderr
    assert not re.search("WARNING|ALERT", r.stderr), r.stderr


def test_nginx(tmp_path):
    if not shutil.which("nginx"):
        pytest.skip("skip: nginx is not installed")
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid; error_log {tmp_path}/log; events {{}}\n"
                                         f"http {{ access_log off; include {DEPLOY}/nginx.conf; }}\n")
    r = run("nginx", "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf")
    assert r.returncode == 0, r.stderr


def test_envoy():
    (envoy,) = documents(DEPLOY / "envoy.yaml")
    (cluster,) = envoy["static_resources"]["clusters"]
    assert cluster["lb_policy"] == "RING_HASH"
    assert cluster["health_checks"][0]["http_health_check"]["path"] == "/health"
    text = (DEPLOY / "envoy.yaml").read_text()
    assert f"cluster: {cluster['name']}" in text and "header_name: x-session-id" in text


def test_kubernetes(shared):
    """Labels and ports agree, the daemon's options exist, and the endpoint picker's metrics are there."""
    every = [d for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for d in documents(path)]
    kinds = {d["kind"]: d for d in every}
    assert {"Deployment", "Service", "PodMonitor", "InferencePool", "HTTPRoute", "PersistentVolumeClaim"} <= set(kinds)
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    for selector in (kinds["Deployment"]["spec"]["selector"], kinds["PodMonitor"]["spec"]["selector"],
                     kinds["InferencePool"]["spec"]["selector"], {"matchLabels": kinds["Service"]["spec"]["selector"]}):
        assert selector["matchLabels"] == labels
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    (container,) = pod["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    assert f"--port={port}" in container["args"]
    assert kinds["InferencePool"]["spec"]["targetPorts"] == [{"number": port}]
    options = (DEPLOY / "keepd.conf").read_text()
    for argument in container["args"]:
        name = argument[2:].split("=")[0]
        assert re.search(rf"^#? ?{re.escape(name)} =", options, re.M), name
    drain = int(next(a for a in container["args"] if a.startswith("--drain-seconds")).split("=")[1])
    assert drain + 5 < pod["spec"]["terminationGracePeriodSeconds"]
    metrics = shared.get("/metrics").text
    for name in kinds["ConfigMap"]["data"].values():
        assert re.search(rf"^{name}\{{", metrics, re.M), name
