//! Edges: who is let in, what is answered to the rest, and what every answer carries.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use steadfast::Engine;
use steadfast_pgtest::{Cluster, Database, on_each_database};
use steadfast_server::{Options, Server};

use crate::site::{Answer, PATIENCE, Site, open, options, soon};

on_each_database! {
    #[tokio::test] async:
    only_loopback_is_listened_on,
    other_hosts_other_pages_and_other_types_stay_out,
    what_is_no_route_is_a_problem_too,
    every_answer_is_neither_kept_nor_guessed,
    health_is_told,
    odd_http_is_refused_by_the_parser,
}

async fn only_loopback_is_listened_on(database: Database) {
    let engine = open(&database).run().unwrap();
    for address in ["0.0.0.0:0", "192.0.2.1:0", "[::]:0", "[2001:db8::1]:0", "[::ffff:127.0.0.1]:0"] {
        let address: SocketAddr = address.parse().unwrap();
        let refused = Server::bind(engine.clone(), Options::on(address)).await.unwrap_err();
        assert_eq!(refused.code(), "not_loopback", "{address}");
        assert!(refused.to_string().contains("no keys"), "{refused}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let refused = Server::bind(engine, Options::on(taken.local_addr().unwrap())).await.unwrap_err();
    assert_eq!(refused.code(), "bind_failed");
    assert_eq!(Options::default().listen.to_string(), "127.0.0.1:7420");
}

async fn other_hosts_other_pages_and_other_types_stay_out(database: Database) {
    let site = Site::new(&database).await;
    let own = format!("http://{}", site.address);
    let local = format!("localhost:{}", site.address.port());
    let post = |body: &'static str| site.request("POST", "/v1/workflows").body(body);
    let json = || post(r#"{"name":"nobody","id":"a"}"#).header("content-type", "application/json");
    for (request, expected) in [
        (json().header("host", "evil.example"), "421 misdirected_request"),
        (site.request("GET", "/healthz").header("host", "evil.example"), "421 misdirected_request"),
        (site.request("GET", "/absent").header("host", "evil.example"), "421 misdirected_request"),
        (site.request("PUT", "/healthz").header("host", "evil.example"), "421 misdirected_request"),
        (json().header("origin", "https://evil.example"), "403 origin_refused"),
        (json().header("origin", "null"), "403 origin_refused"),
        (json().header("origin", "http://localhost:3000"), "403 origin_refused"),
        (site.request("GET", "/v1/workflows").header("origin", "https://evil.example"), "403 origin_refused"),
        (site.request("OPTIONS", "/v1/workflows").header("origin", "https://evil.example"), "403 origin_refused"),
        (post("{}"), "415 unsupported_media_type"),
        (post("{}").header("content-type", "text/plain"), "415 unsupported_media_type"),
        (post("a=b").header("content-type", "application/x-www-form-urlencoded"), "415 unsupported_media_type"),
        (post("{}").header("content-type", "application/x-ndjson"), "415 unsupported_media_type"),
    ] {
        let answer = Answer::of(request).await;
        assert_eq!(answer.problem(), expected);
        assert!(!answer.headers.keys().any(|name| name.as_str().starts_with("access-control")), "{answer:?}");
    }
    assert!(site.ids().await.is_empty());
    let large = "x".repeat(8 << 20);
    let refused = Answer::of(site.request("POST", "/v1/workflows").body(large)).await;
    assert_eq!(refused.problem(), "415 unsupported_media_type", "it can be read although the body was not");
    assert_eq!(Answer::of(json().header("origin", &own)).await.status, 201);
    let named = json().header("host", &local).header("origin", format!("http://{local}"));
    assert_eq!(Answer::of(named).await.status, 200);
}

async fn what_is_no_route_is_a_problem_too(database: Database) {
    let site = Site::new(&database).await;
    for path in
        ["/", "/v1", "/v1/", "/v1/workflows/", "/v1/workflows/a/b", "/v2/workflows", "/v1/workflows/a/scratchpad/"]
    {
        assert_eq!(site.get(path).await.problem(), "404 not_found", "{path}");
    }
    for (method, path, allow) in [
        ("PUT", "/v1/workflows", "POST,GET,HEAD"),
        ("DELETE", "/v1/workflows/a", "GET,HEAD"),
        ("OPTIONS", "/v1/workflows", "POST,GET,HEAD"),
        ("GET", "/v1/workflows/a/cancel", "POST"),
        ("POST", "/v1/workflows/a/result", "GET,HEAD"),
        ("POST", "/healthz", "GET,HEAD"),
        ("FLY", "/metrics", "GET,HEAD"),
    ] {
        let answer = Answer::of(site.request(method, path)).await;
        assert_eq!(answer.problem(), "405 method_not_allowed", "{method} {path}");
        assert_eq!(answer.header("allow"), allow, "{method} {path}");
    }
    // A body that nobody wanted does not keep the answer from being read.
    let answer = site.post("/v1/absent", "x".repeat(4 << 20)).await;
    assert_eq!(answer.problem(), "404 not_found");
}

async fn every_answer_is_neither_kept_nor_guessed(database: Database) {
    let site = Site::new(&database).await;
    for path in ["/v1/workflows", "/v1/workflows/absent", "/absent", "/healthz", "/readyz", "/metrics"] {
        let answer = site.get(path).await;
        assert_eq!(answer.header("x-content-type-options"), "nosniff", "{path}");
        assert_eq!(answer.header("cache-control"), "no-store", "{path}");
    }
    let head = Answer::of(site.request("HEAD", "/v1/workflows")).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
}

async fn health_is_told(database: Database) {
    let mut site = Site::new(&database).await;
    let alive = site.get("/healthz").await;
    assert_eq!((alive.status, alive.body.as_str()), (200, r#"{"alive":true}"#));
    let ready = site.get("/readyz").await;
    assert_eq!((ready.status, ready.body.as_str()), (200, r#"{"ready":true}"#));
    // Once it stops, a server that still answers is not ready: the request was begun before.
    let mut raw = site.connect().await;
    raw.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    raw.read_until("true}").await;
    site.stop();
    site.stopped().await;
}

/// It could be read, so it was said to be ready, and whoever sent work here had all of it refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_refuses_every_write_is_not_ready() {
    let cluster = Cluster::start(&[]);
    // A node that runs nothing, and so wants to write nothing.
    let site = Site::with(options(), Engine::open(&cluster.url("")).unwrap().concurrency(0)).await;
    let until = async |status: u16, what: &str| {
        soon(what, async {
            loop {
                let answer = site.get("/readyz").await;
                if answer.status == status {
                    return answer.body;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await
    };
    // Set read-only, for connections that are there too.
    cluster.sql("alter system set default_transaction_read_only = on; select pg_reload_conf()");
    until(503, "a read-only database to be noticed").await;
    cluster.sql("set default_transaction_read_only = off; alter system reset default_transaction_read_only; select pg_reload_conf()");
    until(200, "it to be ready again").await;

    // A node that cannot even renew its lease, and soon counts as gone.
    cluster.sql(
        "create function full_disk() returns trigger language plpgsql as
             $$ begin raise 'could not extend file' using errcode = 'disk_full'; end $$;
         create trigger full_disk before update on steadfast.nodes execute function full_disk()",
    );
    let body = until(503, "a lease that is not renewed to be noticed").await;
    assert_eq!(body, r#"{"ready":false,"reason":"writes_refused"}"#);
    cluster.sql("drop trigger full_disk on steadfast.nodes");
    until(200, "it to be ready again").await;

    // One table that takes nothing more, as on a disk that is full.
    cluster.sql("create trigger full_disk before insert on steadfast.events execute function full_disk()");
    let begin = Instant::now();
    let start = async |n: u32| site.post("/v1/workflows", format!(r#"{{"name":"nobody","id":"w-{n}"}}"#)).await;
    let mut n = 0;
    let body = loop {
        assert_eq!(start(n).await.problem(), "503 store_unavailable");
        n += 1;
        let ready = site.get("/readyz").await;
        if ready.status == 503 {
            break ready.body;
        }
        assert!(begin.elapsed() < PATIENCE, "it says to be ready and refuses everything");
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    assert_eq!(body, r#"{"ready":false,"reason":"writes_refused"}"#);
    assert!(begin.elapsed() > Duration::from_secs(4), "not at the first refusal");
    cluster.sql("drop trigger full_disk on steadfast.events");
    assert_eq!(start(n).await.status, 201);
    assert_eq!(site.get("/readyz").await.status, 200, "one write ends it");
}

async fn odd_http_is_refused_by_the_parser(database: Database) {
    let site = Site::new(&database).await;
    let many: String = (0..101).map(|n| format!("x-{n}: 1\r\n")).collect();
    let long = "x".repeat(17 << 10);
    for (head, expected) in [
        ("GARBAGE\r\n\r\n".to_owned(), "400"),
        ("GET / HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n".to_owned(), "400"),
        ("GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n".to_owned(), "400"),
        ("GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n".to_owned(), "400"),
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\n{many}\r\n"), "431"),
        (format!("GET / HTTP/1.1\r\nhost: localhost\r\nx: {long}\r\n\r\n"), "431"),
        ("GET /v1/workflows HTTP/1.1\r\n\r\n".to_owned(), "421"),
    ] {
        let mut raw = site.connect().await;
        raw.try_send(&head).await;
        let line = raw.read_until("\r\n\r\n").await;
        assert!(line.starts_with(&format!("HTTP/1.1 {expected} ")), "{}: {line}", &head[..head.len().min(60)]);
    }
}
