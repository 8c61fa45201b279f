//! Signals over HTTP.

use std::time::Duration;

use steadfast_pgtest::{Database, on_each_database};

use crate::site::{Site, soon};

on_each_database! {
    #[tokio::test] async:
    a_signal_is_accepted_once,
    a_bad_signal_changes_nothing,
    what_waits_in_an_inbox_comes_in_pages,
    a_wait_is_shown_and_ends_with_its_signal,
}

async fn a_signal_is_accepted_once(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nobody_knows","id":"a"}"#).await;
    let body = r#"{"name":"paid","signal_id":"one","payload":{"cents":1.0}}"#;
    let first = site.post("/v1/workflows/a/signals", body).await;
    assert_eq!((first.status, first.body.as_str()), (201, r#"{"signal_id":"one","replay":false}"#));
    assert_eq!(first.header("idempotent-replay"), "");
    let again = site.post("/v1/workflows/a/signals", body).await;
    assert_eq!((again.status, again.body.as_str()), (200, r#"{"signal_id":"one","replay":true}"#));
    assert_eq!(again.header("idempotent-replay"), "true");
    let other = site.post("/v1/workflows/a/signals", r#"{"name":"paid","signal_id":"one"}"#).await;
    assert_eq!((other.status, other.json()["code"].as_str()), (409, Some("identity_conflict")));
    assert_eq!(other.json()["id"], "one");
    let named = site.post("/v1/workflows/a/signals", r#"{"name":"paid"}"#).await;
    assert_eq!(named.json()["signal_id"].as_str().map(str::len), Some(36));
    site.post("/v1/workflows/a/cancel", "{}").await;
    assert_eq!(site.post("/v1/workflows/a/signals", body).await.status, 200, "its receipt outlives the workflow's end");
    let late = site.post("/v1/workflows/a/signals", r#"{"name":"paid","signal_id":"late"}"#).await;
    assert_eq!((late.status, late.json()["code"].as_str()), (409, Some("workflow_finished")));
    let nobody = site.post("/v1/workflows/nobody/signals", body).await;
    assert_eq!((nobody.status, nobody.json()["code"].as_str()), (404, Some("unknown_workflow")));
}

async fn a_bad_signal_changes_nothing(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nobody_knows","id":"a"}"#).await;
    let long = format!(r#"{{"name":"{}"}}"#, "x".repeat(129));
    for (body, status, code, field) in [
        ("{}", 400, "invalid_request", "name"),
        (r#"{"name":1}"#, 400, "invalid_request", "name"),
        (r#"{"name":""}"#, 400, "invalid_signal", "name"),
        (&long, 400, "invalid_signal", "name"),
        (r#"{"name":"paid","signal_id":""}"#, 400, "invalid_id", "signal_id"),
        (r#"{"name":"paid","id":"one"}"#, 400, "invalid_request", "id"),
        (r#"{"name":"paid","payload":{"a":1,"a":2}}"#, 400, "invalid_json", "body"),
    ] {
        let refused = site.post("/v1/workflows/a/signals", body.to_owned()).await;
        let document = refused.json();
        assert_eq!((refused.status, document["code"].as_str()), (status, Some(code)), "{body}: {document}");
        if code != "invalid_json" {
            assert_eq!(document["field"], field, "{body}");
        }
    }
    assert_eq!(site.get("/v1/workflows/a/signals").await.body, r#"{"signals":[],"next":null}"#);
}

async fn what_waits_in_an_inbox_comes_in_pages(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nobody_knows","id":"a"}"#).await;
    for n in 1..=5 {
        let body = format!(r#"{{"name":"n{n}","signal_id":"s{n}","payload":{n}.0}}"#);
        assert_eq!(site.post("/v1/workflows/a/signals", body).await.status, 201);
    }
    let mut told = Vec::new();
    let mut path = "/v1/workflows/a/signals?limit=2".to_owned();
    loop {
        let page = site.get(&path).await.json();
        let signals = page["signals"].as_array().unwrap();
        assert!(signals.len() <= 2);
        told.extend(signals.iter().map(|signal| format!("{} {}", signal["number"], signal["payload"])));
        let Some(next) = page["next"].as_u64() else { break };
        path = format!("/v1/workflows/a/signals?limit=2&after={next}");
    }
    assert_eq!(told, ["1 1.0", "2 2.0", "3 3.0", "4 4.0", "5 5.0"]);
    assert_eq!(site.get("/v1/workflows/nobody/signals").await.status, 404);
    assert_eq!(site.get("/v1/workflows/a/signals?after=x").await.status, 400);
}

async fn a_wait_is_shown_and_ends_with_its_signal(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"ask","id":"a"}"#).await;
    let waits = async {
        loop {
            let shown = site.get("/v1/workflows/a").await.json();
            if shown["status"] == "waiting" {
                return shown;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let shown = soon("the workflow to wait", waits).await;
    assert_eq!((&shown["waits_for"], &shown["step"]), (&serde_json::json!(["word"]), &"told".into()));
    let due = shown["due"].as_i64().unwrap();
    let why = site.get("/v1/workflows/a/why").await.json();
    let expected = serde_json::json!(
        {"id": "a", "why": "waiting", "step": "told", "signals": ["word"], "until": due, "on_timeout": "untold"}
    );
    assert_eq!(why, expected);
    assert_eq!(site.post("/v1/workflows/a/signals", r#"{"name":"word","payload":[1.0]}"#).await.status, 201);
    assert_eq!(site.result("a").await.body, r#"{"status":"completed","result":[1.0]}"#);
}
