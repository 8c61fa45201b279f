//! Telemetry: what Prometheus reads.

use std::collections::BTreeMap;

use steadfast_pgtest::{Database, on_each_database};

use crate::site::Site;

on_each_database! {
    #[tokio::test] async:
    what_happened_is_counted,
    several_servers_of_one_process_share_counters_and_keep_their_gauges,
    how_late_timers_fire_and_how_old_snapshots_are_is_told,
}

/// Every sample by its name and labels, after checking the form of each line.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut types = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (kind, name, rest) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            assert!(["HELP", "TYPE"].contains(&kind), "{line}");
            if kind == "TYPE" {
                assert!(["counter", "gauge", "histogram", "summary"].contains(&rest), "{line}");
                assert!(types.insert(name.to_owned(), rest.to_owned()).is_none(), "typed twice: {line}");
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = series.split('{').next().unwrap();
        assert!(name.starts_with("steadfast_"), "{line}");
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{line}");
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        assert!(types.contains_key(name) || types.contains_key(base), "no type: {line}");
        assert!(samples.insert(series.to_owned(), value.parse().unwrap()).is_none(), "twice: {line}");
    }
    samples
}

async fn what_happened_is_counted(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"hold","id":"secret-id"}"#).await;
    site.door.entered().await;
    site.get("/v1/workflows/secret-id").await;
    site.get("/v1/workflows/secret-other").await;
    site.get("/secret/path").await;
    let answer = site.get("/metrics").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, "text/plain; version=0.0.4; charset=utf-8"));
    assert!(!answer.body.contains("secret"), "labels hold words of ours only");
    let samples = parse(&answer.body);
    let sample = |series: &str| *samples.get(series).unwrap_or_else(|| panic!("no {series} in {}", answer.body));
    for series in [
        r#"steadfast_http_requests_total{method="POST",route="/v1/workflows",status="201"}"#,
        r#"steadfast_http_requests_total{method="GET",route="/v1/workflows/{id}",status="200"}"#,
        r#"steadfast_http_requests_total{method="GET",route="/v1/workflows/{id}",status="404"}"#,
        r#"steadfast_http_requests_total{method="GET",route="unmatched",status="404"}"#,
        r#"steadfast_http_request_seconds_count{method="POST",route="/v1/workflows"}"#,
        r#"steadfast_http_request_seconds_bucket{method="POST",route="/v1/workflows",le="+Inf"}"#,
        "steadfast_commits_total",
        "steadfast_events_total",
        "steadfast_commit_seconds_count",
    ] {
        assert!(sample(series) >= 1.0, "{series}");
    }
    assert_eq!(sample("steadfast_running_workflows"), 1.0);
    assert!(sample("steadfast_store_bytes") > 0.0);
    assert!(sample("steadfast_http_connections") >= 1.0);
    // A sweep or a heartbeat may be on its way at any moment, and not at every one.
    let mut looks = 0;
    while parse(&site.get("/metrics").await.body)["steadfast_waiting_commands"] != 0.0 {
        looks += 1;
        assert!(looks < 100, "something waits for ever");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

async fn several_servers_of_one_process_share_counters_and_keep_their_gauges(database: Database) {
    let (one, other) = (Site::new(&database).await, Site::new(&database.another()).await);
    one.start(r#"{"name":"hold"}"#).await;
    one.door.entered().await;
    let running = |text: &str| parse(text)["steadfast_running_workflows"];
    assert_eq!(running(&one.get("/metrics").await.body), 1.0);
    assert_eq!(running(&other.get("/metrics").await.body), 0.0);
    let series = r#"steadfast_http_requests_total{method="GET",route="/metrics",status="200"}"#;
    assert!(parse(&other.get("/metrics").await.body)[series] >= 2.0);
}

async fn how_late_timers_fire_and_how_old_snapshots_are_is_told(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nap","id":"a","input":20}"#).await;
    site.get("/v1/workflows/a/result?wait_ms=60000").await;
    let samples = parse(&site.get("/metrics").await.body);
    assert!(samples["steadfast_timer_lateness_seconds_count"] >= 1.0);
    assert!(samples.contains_key(r#"steadfast_timer_lateness_seconds_bucket{le="0.0005"}"#), "it is a histogram");
    assert_eq!(samples.contains_key("steadfast_oldest_snapshot_seconds"), database.file().is_none());
    assert_eq!(samples.contains_key("steadfast_oldest_snapshot_transactions"), database.file().is_none());
}
