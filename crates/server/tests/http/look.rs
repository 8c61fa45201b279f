//! Looks: a workflow, its log, its scratchpad, and lists of them.

use std::time::Duration;

use serde_json::{Value, json};
use steadfast_pgtest::{Database, on_each_database};

use crate::site::{Site, open, options, word};

on_each_database! {
    #[tokio::test] async:
    a_workflow_is_shown_as_it_stands,
    progress_is_shown_with_the_claim,
    a_list_is_paged_and_filtered,
    a_log_is_paged,
    a_scratchpad_is_paged,
    a_page_ends_before_it_becomes_too_large,
    what_is_not_there_is_said_so,
    an_address_is_checked,
    any_id_can_be_asked_for,
}

async fn a_workflow_is_shown_as_it_stands(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"hold","id":"held","options":{"priority":3,"tags":["x"]}}"#).await;
    site.door.entered().await;
    let held = site.get("/v1/workflows/held").await.json();
    let shown = |name: &str| held[name].clone();
    assert_eq!(
        ["status", "name", "step", "visit", "attempt", "delivery", "seq", "priority", "tags"].map(shown),
        [
            json!("running"),
            json!("hold"),
            json!("start"),
            json!(1),
            json!(1),
            json!(1),
            json!(1),
            json!(3),
            json!(["x"])
        ]
    );
    let claim = &held["claim"];
    assert!(word(&claim["worker"]).starts_with("n1."), "{claim}");
    assert!(claim["lease_until"].as_i64() > claim["started_at"].as_i64());
    assert!(held["created_at"].as_i64().unwrap() > 1_600_000_000_000);
    assert!(held.get("result").is_none() && held.get("error").is_none() && held.get("due").is_none(), "{held}");
    site.door.let_one_through();
    site.result("held").await;
    let ended = site.get("/v1/workflows/held").await.json();
    assert_eq!((&ended["status"], &ended["result"]), (&"completed".into(), &"through".into()));
    assert_eq!((&ended["step"], ended.get("claim")), (&Value::Null, None));

    site.start(r#"{"name":"nap","id":"asleep"}"#).await;
    let asleep = loop {
        let asleep = site.get("/v1/workflows/asleep").await.json();
        if asleep["status"] == "sleeping" {
            break asleep;
        }
    };
    assert!(asleep["due"].as_i64().unwrap() >= asleep["updated_at"].as_i64().unwrap() + 3_590_000, "{asleep}");
    assert_eq!((&asleep["step"], &asleep["visit"]), (&"later".into(), &2.into()));

    site.start(r#"{"name":"refuse","id":"failed"}"#).await;
    let result = site.result("failed").await;
    assert_eq!(result.body, r#"{"status":"failed","error":{"code":"boom","reason":"it broke"}}"#);
    let failed = site.get("/v1/workflows/failed").await.json();
    assert_eq!(failed["error"], json!({"code": "boom", "reason": "it broke"}));
}

async fn progress_is_shown_with_the_claim(database: Database) {
    let site = Site::with(options(), open(&database).lease(Duration::from_millis(300))).await;
    site.start(r#"{"name":"hold","id":"a"}"#).await;
    site.door.entered().await;
    // The next heartbeat brings it.
    let seen = async {
        loop {
            let workflow = site.get("/v1/workflows/a").await.json();
            if let Some(progress) = workflow["claim"].get("progress") {
                return progress.clone();
            }
        }
    };
    assert_eq!(crate::site::soon("the progress", seen).await, "at the door");
}

async fn a_list_is_paged_and_filtered(database: Database) {
    let site = Site::new(&database).await;
    for n in 0..7 {
        site.start(format!(r#"{{"name":"echo","id":"e{n}"}}"#)).await;
        site.result(&format!("e{n}")).await;
    }
    site.start(r#"{"name":"nobody","id":"n"}"#).await;
    let mut pages = Vec::new();
    let mut next = String::new();
    loop {
        let page = site.get(&format!("/v1/workflows?limit=3{next}")).await.json();
        let ids: Vec<_> = page["workflows"].as_array().unwrap().iter().map(|item| word(&item["id"])).collect();
        pages.push(ids.join(" "));
        match page["next"].as_str() {
            Some(cursor) => next = format!("&before={cursor}"),
            None => break,
        }
    }
    let pages: Vec<_> = pages.into_iter().filter(|page| !page.is_empty()).collect();
    assert_eq!(pages, ["n e6 e5", "e4 e3 e2", "e1 e0"]);
    let ids = async |query: &str| {
        let page = site.get(&format!("/v1/workflows?{query}")).await.json();
        page["workflows"].as_array().unwrap().iter().map(|item| word(&item["id"])).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(ids("name=nobody").await, "n");
    assert_eq!(ids("name=echo&limit=2").await, "e6 e5");
    assert_eq!(ids("status=ready").await, "n");
    assert_eq!(ids("status=completed&name=echo").await, "e6 e5 e4 e3 e2 e1 e0");
    assert_eq!(ids("status=failed").await, "");
    assert_eq!(ids("name=absent").await, "");
}

async fn a_log_is_paged(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"write","id":"a","input":1}"#).await;
    site.result("a").await;
    let kinds = async |query: &str| {
        let page = site.get(&format!("/v1/workflows/a/events{query}")).await.json();
        let events: Vec<_> = page["events"].as_array().unwrap().clone();
        let kinds: Vec<_> = events.iter().map(|event| format!("{} {}", event["seq"], word(&event["type"]))).collect();
        format!("{} -> {}", kinds.join(", "), page["next"])
    };
    assert_eq!(
        kinds("").await,
        "0 workflow_created, 1 step_started, 2 step_completed, 3 step_started, 4 step_completed, 5 workflow_completed -> null"
    );
    assert_eq!(kinds("?limit=2").await, "0 workflow_created, 1 step_started -> 2");
    assert_eq!(kinds("?limit=2&from=2").await, "2 step_completed, 3 step_started -> 4");
    assert_eq!(kinds("?limit=2&from=4").await, "4 step_completed, 5 workflow_completed -> null");
    assert_eq!(kinds("?from=6").await, " -> null");
    assert_eq!(kinds("?from=9223372036854775807").await, " -> null");
    let page = site.get("/v1/workflows/a/events?from=2&limit=1").await;
    assert!(page.body.contains(r#""writes":{"exact":1.10,"b":"bee"}"#), "{}", page.body);
    assert!(page.json()["events"][0]["at"].as_i64().is_some());
}

async fn a_scratchpad_is_paged(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"write","id":"a","input":null,"writes":{"z/z":[1.0]}}"#).await;
    site.result("a").await;
    let page = site.get("/v1/workflows/a/scratchpad").await;
    assert_eq!(
        page.body,
        r#"{"variables":[{"key":"b","value":"bee","seq":2},{"key":"exact","value":1.10,"seq":2},{"key":"input","value":null,"seq":0},{"key":"z/z","value":[1.0],"seq":0}],"next":null}"#
    );
    let page = site.get("/v1/workflows/a/scratchpad?limit=2").await.json();
    assert_eq!((&page["variables"][1]["key"], &page["next"]), (&"exact".into(), &"exact".into()));
    let page = site.get("/v1/workflows/a/scratchpad?limit=2&after=exact").await.json();
    assert_eq!((&page["variables"][1]["key"], &page["next"]), (&"z/z".into(), &Value::Null));
    let page = site.get("/v1/workflows/a/scratchpad?after=zz").await.json();
    assert_eq!(page["variables"], json!([]));
    assert_eq!(site.get("/v1/workflows/a/scratchpad/z%2Fz").await.json()["value"], json!([1.0]));
    assert_eq!(site.get("/v1/workflows/a/scratchpad/absent").await.problem(), "404 unknown_key");
}

async fn a_page_ends_before_it_becomes_too_large(database: Database) {
    let site = Site::idle(&database, options()).await;
    let mib = format!("\"{}\"", "x".repeat((1 << 20) - 2));
    site.start(format!(r#"{{"name":"echo","id":"a","input":{mib},"writes":{{"a":{mib},"b":{mib},"c":{mib}}}}}"#)).await;
    // Four values of one MiB and their keys are more than 4 MiB.
    let page = site.get("/v1/workflows/a/scratchpad").await.json();
    assert_eq!((page["variables"].as_array().unwrap().len(), &page["next"]), (3, &"c".into()));
    let page = site.get("/v1/workflows/a/scratchpad?after=c").await.json();
    assert_eq!((page["variables"].as_array().unwrap().len(), &page["next"]), (1, &Value::Null));
    // One event alone may be larger.
    let page = site.get("/v1/workflows/a/events").await;
    assert!(page.body.len() > 4 << 20);
    assert_eq!(page.json()["next"], Value::Null);
}

async fn what_is_not_there_is_said_so(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"echo","id":"a"}"#).await;
    for path in ["", "/events", "/scratchpad", "/scratchpad/k", "/result", "/result?wait_ms=1000"] {
        let answer = site.get(&format!("/v1/workflows/absent{path}")).await;
        assert_eq!(answer.problem(), "404 unknown_workflow", "{path}");
        assert_eq!(answer.json()["id"], "absent");
    }
}

async fn an_address_is_checked(database: Database) {
    let site = Site::new(&database).await;
    site.start(r#"{"name":"echo","id":"a"}"#).await;
    let long = "x".repeat(257);
    for (path, expected) in [
        ("/v1/workflows?limit=0".to_owned(), "400 invalid_request limit"),
        ("/v1/workflows?limit=501".to_owned(), "400 invalid_request limit 500"),
        ("/v1/workflows?limit=-1".to_owned(), "400 invalid_request limit"),
        ("/v1/workflows?limit=1e1".to_owned(), "400 invalid_request limit"),
        ("/v1/workflows?limit=".to_owned(), "400 invalid_request limit"),
        ("/v1/workflows?limit=99999999999999999999999".to_owned(), "400 invalid_request limit 500"),
        ("/v1/workflows?limit=1&limit=2".to_owned(), "400 invalid_request limit"),
        ("/v1/workflows?state=ready".to_owned(), "400 invalid_request state"),
        ("/v1/workflows?status=blocked".to_owned(), "400 invalid_request status"),
        ("/v1/workflows?status=Ready".to_owned(), "400 invalid_request status"),
        ("/v1/workflows?name=".to_owned(), "400 invalid_name name 128"),
        ("/v1/workflows?before=7".to_owned(), "400 invalid_request before"),
        ("/v1/workflows?before=c-7".to_owned(), "400 invalid_request before"),
        ("/v1/workflows/a?x=1".to_owned(), "400 invalid_request x"),
        ("/v1/workflows/a/events?from=-1".to_owned(), "400 invalid_request from"),
        ("/v1/workflows/a/events?from=9223372036854775808".to_owned(), "400 invalid_request from 9223372036854775807"),
        ("/v1/workflows/a/scratchpad?after=".to_owned(), "400 invalid_key after 256"),
        (format!("/v1/workflows/a/scratchpad?after={long}"), "400 invalid_key after 256"),
        (format!("/v1/workflows/a/scratchpad/{long}"), "400 invalid_key key 256"),
        ("/v1/workflows/a/scratchpad/a%00b".to_owned(), "400 invalid_key key"),
        ("/v1/workflows/a/result?wait_ms=60001".to_owned(), "400 invalid_request wait_ms 60000"),
        (format!("/v1/workflows/{}", &long[..129]), "400 invalid_id id 128"),
        ("/v1/workflows/a%0ab".to_owned(), "400 invalid_id id"),
        ("/v1/workflows/a%ffb".to_owned(), "400 invalid_id path"),
    ] {
        assert_eq!(site.get(&path).await.problem(), expected, "{path}");
    }
    assert_eq!(site.get("/v1/workflows?limit=1").await.status, 200);
    assert_eq!(site.get("/v1/workflows?limit=500").await.status, 200);
}

async fn any_id_can_be_asked_for(database: Database) {
    let site = Site::new(&database).await;
    for (id, path) in [
        ("bulk", "bulk"),
        ("a/b", "a%2Fb"),
        ("a?b#c", "a%3Fb%23c"),
        ("a b", "a%20b"),
        ("a%2Fb", "a%252Fb"),
        ("日本", "%E6%97%A5%E6%9C%AC"),
    ] {
        assert_eq!(site.start(json!({"name": "echo", "id": id}).to_string()).await.status, 201);
        assert_eq!(site.result(path).await.json()["status"], "completed");
        assert_eq!(site.get(&format!("/v1/workflows/{path}")).await.json()["id"], id);
        assert_eq!(site.get(&format!("/v1/workflows/{path}/events")).await.json()["events"][0]["seq"], 0);
        assert_eq!(site.get(&format!("/v1/workflows/{path}/scratchpad/input")).await.json()["value"], Value::Null);
    }
}
