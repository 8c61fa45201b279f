//! Starts: accepted once, answered the same, refused without a trace.

use steadfast::Bounds;
use steadfast::store::faults::Fault;
use steadfast_pgtest::{Database, on_each_database};

use crate::site::{Site, faulty, open, options, word};

on_each_database! {
    #[tokio::test] async:
    a_start_runs_and_its_result_can_be_read,
    without_an_id_each_start_is_a_new_workflow,
    the_same_request_again_is_a_replay_and_another_one_a_conflict,
    a_definition_that_no_worker_knows_is_accepted_with_a_warning,
    options_and_variables_arrive,
    an_overloaded_engine_says_when_to_come_again,
    an_unknown_outcome_names_the_id_that_tells,
    a_store_that_refuses_leaves_no_trace,
    what_takes_too_long_is_unknown_and_still_happens,
    a_client_that_hangs_up_costs_its_workflow_nothing,
    an_engine_that_is_shut_down_says_so,
}

async fn a_start_runs_and_its_result_can_be_read(database: Database) {
    let site = Site::new(&database).await;
    let started = site.start(r#"{"name":"echo","id":"a","input":[1,2]}"#).await;
    assert_eq!((started.status, started.body.as_str()), (201, r#"{"id":"a","replay":false}"#));
    assert_eq!(started.header("content-type"), "application/json");
    let result = site.result("a").await;
    assert_eq!((result.status, result.body.as_str()), (200, r#"{"status":"completed","result":[1,2]}"#));
}

async fn without_an_id_each_start_is_a_new_workflow(database: Database) {
    let site = Site::idle(&database, options()).await;
    let first = word(&site.start(r#"{"name":"echo"}"#).await.json()["id"]);
    let second = word(&site.start(r#"{"name":"echo","id":null}"#).await.json()["id"]);
    assert_eq!(first.len(), 36);
    assert_eq!(site.ids().await, [second, first], "newest first");
}

async fn the_same_request_again_is_a_replay_and_another_one_a_conflict(database: Database) {
    let site = Site::new(&database).await;
    let first = site.start(r#"{"name":"echo","id":"a","input":{"n":1.0},"writes":{"k":1}}"#).await;
    assert_eq!((first.status, first.header("idempotent-replay")), (201, ""));
    // Other bytes, the same meaning.
    let again = site.start(r#"{ "writes": {"\u006b":1}, "input":{"n":1}, "id":"a", "name":"echo"}"#).await;
    assert_eq!((again.status, again.body.as_str()), (200, r#"{"id":"a","replay":true}"#));
    assert_eq!(again.header("idempotent-replay"), "true");
    for other in [
        r#"{"name":"echo","id":"a","input":{"n":2},"writes":{"k":1}}"#,
        r#"{"name":"echo","id":"a","input":{"n":1},"writes":{"k":2}}"#,
        r#"{"name":"refuse","id":"a","input":{"n":1},"writes":{"k":1}}"#,
        r#"{"name":"echo","id":"a","input":{"n":1},"writes":{"k":1},"options":{"priority":1}}"#,
    ] {
        let conflict = site.start(other).await;
        assert_eq!(conflict.problem(), "409 identity_conflict", "{other}");
        let document = conflict.json();
        assert_eq!((&document["id"], &document["class"]), (&"a".into(), &"conflict".into()));
    }
    assert_eq!(site.result("a").await.body, r#"{"status":"completed","result":{"n":1.0}}"#);
    let late = site.start(r#"{"name":"echo","id":"a","input":{"n":1},"writes":{"k":1}}"#).await;
    assert_eq!(late.status, 200, "a replay after the end is still one");
    assert_eq!(site.ids().await, ["a"]);
}

async fn a_definition_that_no_worker_knows_is_accepted_with_a_warning(database: Database) {
    let site = Site::new(&database).await;
    let started = site.start(r#"{"name":"nobody","id":"a"}"#).await;
    assert_eq!((started.status, started.body.as_str()), (201, r#"{"id":"a","replay":false,"warning":"no_worker"}"#));
    let workflow = site.get("/v1/workflows/a").await.json();
    assert_eq!((&workflow["status"], &workflow["blocked"]), (&"ready".into(), &"unknown_step".into()));
}

async fn options_and_variables_arrive(database: Database) {
    let site = Site::idle(&database, options()).await;
    let body = r#"{"name":"echo","id":"a","writes":{"user":{"n":1.50}},"options":{"retry":{"attempts_max":3,
        "first_delay_ms":10,"factor_percent":150,"max_delay_ms":1000,"jitter_percent":0},"step_timeout_ms":5000,
        "priority":-7,"tags":["red","blue"]}}"#;
    assert_eq!(site.start(body).await.status, 201);
    let events = site.get("/v1/workflows/a/events").await.json();
    let options = &events["events"][0]["payload"]["options"];
    let expected = serde_json::json!({
        "retry": {"attempts_max": 3, "first_delay_ms": 10, "factor_percent": 150, "max_delay_ms": 1000, "jitter_percent": 0},
        "step_timeout_ms": 5000, "priority": -7, "tags": ["red", "blue"]
    });
    assert_eq!(*options, expected);
    let variable = site.get("/v1/workflows/a/scratchpad/user").await;
    assert_eq!(variable.body, r#"{"key":"user","value":{"n":1.50},"seq":0}"#);
}

async fn an_overloaded_engine_says_when_to_come_again(database: Database) {
    let bounds = Bounds { begin_waiting: 0, ..Bounds::default() };
    let site = Site::with(options(), open(&database).bounds(bounds)).await;
    let refused = site.start(r#"{"name":"echo"}"#).await;
    assert_eq!(refused.problem(), "429 overloaded");
    assert_eq!(refused.header("retry-after"), "1");
    let document = refused.json();
    assert_eq!((&document["retry_after_ms"], &document["class"]), (&100.into(), &"refused_retryable".into()));
    assert!(site.ids().await.is_empty());
}

async fn an_unknown_outcome_names_the_id_that_tells(database: Database) {
    let (builder, plan) = faulty(&database);
    let site = Site::with(options(), builder.concurrency(0)).await;
    plan.add([Fault::UnknownWritten]);
    let unknown = site.start(r#"{"name":"echo","input":1}"#).await;
    assert_eq!(unknown.problem(), "503 outcome_unknown");
    let document = unknown.json();
    assert_eq!(document["class"], "unknown");
    assert!(word(&document["detail"]).contains("same id"));
    let id = word(&document["id"]);
    let again = site.start(format!(r#"{{"name":"echo","input":1,"id":"{id}"}}"#)).await;
    assert_eq!(again.json()["replay"], true, "it had been written: {again:?}");
    plan.add([Fault::UnknownNotWritten]);
    let unknown = site.start(r#"{"name":"echo","id":"b"}"#).await;
    assert_eq!((unknown.problem().as_str(), &unknown.json()["id"]), ("503 outcome_unknown", &"b".into()));
    assert_eq!(site.start(r#"{"name":"echo","id":"b"}"#).await.status, 201, "it had not");
}

async fn a_store_that_refuses_leaves_no_trace(database: Database) {
    let (builder, plan) = faulty(&database);
    let site = Site::with(options(), builder.concurrency(0)).await;
    // Twice: in a batch with a sweep the commands are run one by one after the first.
    plan.add([Fault::NotCommitted, Fault::NotCommitted]);
    let refused = site.start(r#"{"name":"echo","id":"a"}"#).await;
    assert_eq!(refused.problem(), "503 store_unavailable");
    assert_eq!(refused.json()["class"], "refused_retryable");
    assert!(!refused.body.contains("injected"), "what the store said is not the caller's");
    assert!(site.ids().await.is_empty());
}

async fn what_takes_too_long_is_unknown_and_still_happens(database: Database) {
    // One thread for whatever looks at the store, so that the test can keep looks waiting.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    let scenario = async move {
        let (builder, plan) = faulty(&database);
        let site = Site::with(options(), builder).await;
        let request_timeout = std::time::Duration::from_millis(20);
        let hasty = site.beside(steadfast_server::Options { request_timeout, ..options() }).await;
        plan.hold_syncs_after(0);
        let unknown = hasty.start(r#"{"name":"echo","id":"a","input":7}"#).await;
        assert_eq!((unknown.problem().as_str(), &unknown.json()["id"]), ("503 outcome_unknown", &"a".into()));
        plan.release_syncs();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let holding = tokio::task::spawn_blocking(move || held.recv());
        assert_eq!(hasty.get("/v1/workflows/a").await.problem(), "503 request_timeout");
        drop(release);
        holding.await.unwrap().unwrap_err();
        // The start goes on without its caller; asking again for it tells.
        assert!([200, 201].contains(&site.start(r#"{"name":"echo","id":"a","input":7}"#).await.status));
        assert_eq!(site.result("a").await.body, r#"{"status":"completed","result":7}"#);
    };
    std::thread::spawn(move || runtime.block_on(scenario)).join().unwrap();
}

async fn a_client_that_hangs_up_costs_its_workflow_nothing(database: Database) {
    // A step granted to a start whose caller went away would otherwise be nobody's until its lease ends.
    let site = Site::new(&database).await;
    for n in 0..50 {
        let body = format!(r#"{{"name":"echo","id":"w{n}"}}"#);
        let mut raw = site.connect().await;
        raw.send(&format!(
            "POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))
        .await;
        drop(raw);
    }
    // Whichever of them arrived ends at once.
    for id in site.ids().await {
        assert_eq!(site.result(&id).await.status, 200);
    }
}

async fn an_engine_that_is_shut_down_says_so(database: Database) {
    let site = Site::new(&database).await;
    site.engine.clone().shutdown(std::time::Duration::ZERO).await;
    let refused = site.start(r#"{"name":"echo"}"#).await;
    assert_eq!(refused.problem(), "503 shut_down");
    assert_eq!(site.bulk("{\"name\":\"echo\"}\n").await.json()["error"]["code"], "shut_down");
}
