//! Results and cancels.

use std::time::{Duration, Instant};

use steadfast_pgtest::{Database, on_each_database};

use crate::site::{Site, soon};

on_each_database! {
    #[tokio::test] async:
    a_result_can_be_waited_for,
    a_cancel_tells_what_it_did,
    a_cancel_needs_no_body,
    a_bad_cancel_changes_nothing,
    a_wait_hears_of_a_cancel,
}

async fn a_result_can_be_waited_for(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"hold","id":"a"}"#).await;
    site.door.entered().await;
    let now = site.get("/v1/workflows/a/result").await;
    assert_eq!((now.status, now.body.as_str()), (202, r#"{"status":"running"}"#));
    let began = Instant::now();
    let short = site.get("/v1/workflows/a/result?wait_ms=50").await;
    assert_eq!((short.status, short.body.as_str()), (202, r#"{"status":"running"}"#));
    assert!(began.elapsed() >= Duration::from_millis(50));
    let waits = site.get("/v1/workflows/a/result?wait_ms=20000");
    let opens = async {
        // The waiting request is there before the door opens, or comes after it: both must hear.
        tokio::task::yield_now().await;
        site.door.let_one_through();
    };
    let (waited, ()) = tokio::join!(waits, opens);
    assert_eq!((waited.status, waited.body.as_str()), (200, r#"{"status":"completed","result":"through"}"#));
    assert!(began.elapsed() < Duration::from_secs(10));
}

async fn a_cancel_tells_what_it_did(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"hold","id":"a"}"#).await;
    site.door.entered().await;
    let cancelled = site.post("/v1/workflows/a/cancel", r#"{"reason":"no longer needed","by":"ops"}"#).await;
    assert_eq!((cancelled.status, cancelled.body.as_str()), (200, r#"{"outcome":"cancelled"}"#));
    let again = site.post("/v1/workflows/a/cancel", "{}").await;
    assert_eq!(
        (again.status, again.body.as_str()),
        (
            200,
            r#"{"outcome":"already_finished","status":"cancelled","error":{"code":"cancelled","reason":"no longer needed"}}"#
        )
    );
    let result = site.result("a").await;
    assert_eq!(result.body, r#"{"status":"cancelled","error":{"code":"cancelled","reason":"no longer needed"}}"#);
    let events = site.get("/v1/workflows/a/events").await.json();
    let last = events["events"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last["payload"], serde_json::json!({"reason": "no longer needed", "by": "ops"}));

    site.start(r#"{"name":"echo","id":"b","input":1.0}"#).await;
    site.result("b").await;
    let late = site.post("/v1/workflows/b/cancel", "{}").await;
    assert_eq!(late.body, r#"{"outcome":"already_finished","status":"completed","result":1.0}"#);
}

async fn a_cancel_needs_no_body(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nobody","id":"a"}"#).await;
    let answer = crate::site::Answer::of(site.request("POST", "/v1/workflows/a/cancel")).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, r#"{"outcome":"cancelled"}"#));
    let events = site.get("/v1/workflows/a/events?from=1").await.json();
    assert_eq!(events["events"][0]["payload"], serde_json::json!({"reason": "", "by": "api"}));
}

async fn a_bad_cancel_changes_nothing(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nobody","id":"a"}"#).await;
    let padded = |size: usize| format!("{{}}{}", " ".repeat(size - 2));
    for (path, body, expected) in [
        ("absent", "{}".to_owned(), "404 unknown_workflow"),
        ("a", "[]".to_owned(), "400 invalid_request body"),
        ("a", "{".to_owned(), "400 invalid_json"),
        ("a", r#"{"reason":1}"#.to_owned(), "400 invalid_request reason"),
        ("a", r#"{"force":true}"#.to_owned(), "400 invalid_request force"),
        ("a", padded((4 << 20) + 1), "413 body_too_large 4194304"),
        ("a%00", "{}".to_owned(), "400 invalid_id id"),
    ] {
        let answer = site.post(&format!("/v1/workflows/{path}/cancel"), body).await;
        assert_eq!(answer.problem(), expected, "{path}");
    }
    assert_eq!(site.get("/v1/workflows/a").await.json()["status"], "ready");
    assert_eq!(site.post("/v1/workflows/a/cancel", padded(4 << 20)).await.status, 200);
}

async fn a_wait_hears_of_a_cancel(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"nobody","id":"a"}"#).await;
    let waits = site.get("/v1/workflows/a/result?wait_ms=20000");
    let cancels = site.post("/v1/workflows/a/cancel", r#"{"reason":"enough"}"#);
    let (waited, _) = soon("the wait to end", async { tokio::join!(waits, cancels) }).await;
    assert_eq!(waited.body, r#"{"status":"cancelled","error":{"code":"cancelled","reason":"enough"}}"#);
}
