//! Slow: clients that would keep a connection for ever, and too many of them.

use std::time::{Duration, Instant};

use steadfast::Engine;
use steadfast_pgtest::{Database, on_each_database, psql};
use steadfast_server::Options;
use tokio::net::TcpSocket;

use crate::site::{PATIENCE, Raw, Site, options, soon};

on_each_database! {
    #[tokio::test] async:
    a_silent_connection_is_closed,
    half_a_head_is_not_waited_for,
    a_head_byte_by_byte_has_no_more_time,
    the_next_head_has_its_own_time,
    a_resting_connection_is_closed,
    a_long_poll_is_no_slow_client,
    a_body_that_does_not_come_is_refused,
    a_body_byte_by_byte_has_no_more_time,
    a_line_that_does_not_come_ends_the_bulk,
    a_bulk_as_a_whole_has_a_time,
    an_answer_that_is_not_read_is_given_up,
    a_reader_that_is_merely_slow_gets_all,
    one_connection_too_many_is_told_so,
    many_silent_connections_do_not_hinder_the_rest,
    whoever_vanishes_leaves_nothing_half_done,
}

/// Short enough to wait for, long enough for a busy machine to keep within.
const SHORT: Duration = Duration::from_millis(300);
/// Never reached in a test.
const LONG: Duration = Duration::from_secs(600);

/// Only the timeout under test can end anything.
fn patient() -> Options {
    Options {
        header_timeout: LONG,
        idle_timeout: LONG,
        body_timeout: LONG,
        write_timeout: LONG,
        request_timeout: LONG,
        bulk_timeout: LONG,
        ..options()
    }
}

async fn a_silent_connection_is_closed(database: Database) {
    let site = Site::idle(&database, Options { header_timeout: SHORT, ..patient() }).await;
    let began = Instant::now();
    let mut raw = site.connect().await;
    assert_eq!(raw.read_to_end().await, "");
    assert!(began.elapsed() >= SHORT, "{:?}", began.elapsed());
}

async fn half_a_head_is_not_waited_for(database: Database) {
    let site = Site::idle(&database, Options { header_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    raw.send("GET /healthz HTTP/1.1\r\nhost: local").await;
    assert_eq!(raw.read_to_end().await, "");
}

async fn a_head_byte_by_byte_has_no_more_time(database: Database) {
    let site = Site::idle(&database, Options { header_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    raw.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: ").await;
    let began = Instant::now();
    while raw.try_send("x").await {
        tokio::time::sleep(SHORT / 10).await;
        assert!(began.elapsed() < PATIENCE, "it goes on for ever");
    }
}

async fn the_next_head_has_its_own_time(database: Database) {
    let site = Site::idle(&database, Options { header_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    let request = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n";
    // Between two requests a connection may rest for much longer than a head may take.
    for _ in 0..2 {
        raw.send(request).await;
        raw.read_until("true}").await;
        tokio::time::sleep(SHORT * 2).await;
    }
    raw.send(&request[..10]).await;
    let began = Instant::now();
    assert_eq!(raw.read_to_end().await, "");
    assert!(began.elapsed() < PATIENCE / 2);
}

async fn a_resting_connection_is_closed(database: Database) {
    let site = Site::idle(&database, Options { idle_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    raw.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    raw.read_until("true}").await;
    let began = Instant::now();
    assert_eq!(raw.read_to_end().await, "");
    assert!(began.elapsed() >= SHORT / 2, "{:?}", began.elapsed());
}

async fn a_long_poll_is_no_slow_client(database: Database) {
    let site = Site::idle(&database, Options { header_timeout: SHORT, idle_timeout: SHORT, ..patient() }).await;
    site.start(r#"{"name":"echo","id":"a"}"#).await;
    let answer = site.get("/v1/workflows/a/result?wait_ms=1000").await;
    assert_eq!(answer.status, 202);
}

async fn a_body_that_does_not_come_is_refused(database: Database) {
    let site = Site::idle(&database, Options { body_timeout: SHORT, ..patient() }).await;
    for body in ["content-length: 100\r\n\r\n{\"name\":", "transfer-encoding: chunked\r\n\r\n8\r\n{\"name\":\r\n"] {
        let mut raw = site.connect().await;
        raw.send(&format!(
            "POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{body}"
        ))
        .await;
        let answer = raw.read_to_end().await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert!(answer.contains("body_timeout"), "{answer}");
    }
    assert!(site.ids().await.is_empty());
}

async fn a_body_byte_by_byte_has_no_more_time(database: Database) {
    let site = Site::idle(&database, Options { body_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    raw.send("POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n")
        .await;
    let began = Instant::now();
    while raw.try_send(" ").await {
        tokio::time::sleep(SHORT / 10).await;
        assert!(began.elapsed() < PATIENCE, "it goes on for ever");
    }
}

async fn a_line_that_does_not_come_ends_the_bulk(database: Database) {
    let site = Site::idle(&database, Options { body_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    raw.send("POST /v1/workflows/bulk HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    raw.chunk("{\"name\":\"echo\",\"id\":\"a\"}\n{\"name\":").await;
    let answer = raw.read_to_end().await;
    assert!(answer.contains(r#"{"line":1,"id":"a","replay":false}"#), "{answer}");
    assert!(answer.contains(r#"{"line":2,"error":{"type":"urn:steadfast:problem:body_timeout""#), "{answer}");
    assert_eq!(site.ids().await, ["a"]);
}

async fn a_bulk_as_a_whole_has_a_time(database: Database) {
    let site = Site::idle(&database, Options { bulk_timeout: SHORT, ..patient() }).await;
    let mut raw = site.connect().await;
    raw.send("POST /v1/workflows/bulk HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    let began = Instant::now();
    // Empty lines are none, so no line is late.
    while raw.try_send("1\r\n\n\r\n").await {
        tokio::time::sleep(SHORT / 10).await;
        assert!(began.elapsed() < PATIENCE, "it goes on for ever");
    }
}

async fn an_answer_that_is_not_read_is_given_up(database: Database) {
    let site = Site::idle(&database, Options { write_timeout: SHORT, connections_max: 2, ..patient() }).await;
    let mib = format!("\"{}\"", "x".repeat((1 << 20) - 2));
    site.start(format!(r#"{{"name":"echo","id":"a","input":{mib},"writes":{{"a":{mib},"b":{mib}}}}}"#)).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut raw = Raw(socket.connect(site.address).await.unwrap());
    // More than the buffers of both sides hold together.
    raw.send(&"GET /v1/workflows/a/events HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(8)).await;
    let connections = async {
        loop {
            let metrics = site.get("/metrics").await.body;
            if metrics.contains("\nsteadfast_http_connections 1\n") {
                return;
            }
            tokio::time::sleep(SHORT / 10).await;
        }
    };
    soon("the connection to be given up", connections).await;
    let answer = raw.read_to_end().await;
    assert!(answer.len() < 24 << 20, "all of it came: {} bytes", answer.len());
}

async fn a_reader_that_is_merely_slow_gets_all(database: Database) {
    let site = Site::idle(&database, Options { write_timeout: SHORT, ..patient() }).await;
    let mib = format!("\"{}\"", "x".repeat((1 << 20) - 2));
    site.start(format!(r#"{{"name":"echo","id":"a","input":{mib},"writes":{{"a":{mib},"b":{mib}}}}}"#)).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 << 10).unwrap();
    let mut raw = Raw(socket.connect(site.address).await.unwrap());
    let requests = 4;
    raw.send(&"GET /v1/workflows/a/events HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(requests)).await;
    let mut read = 0;
    let mut buffer = vec![0; 256 << 10];
    // Several times the timeout in all, but never still for that long.
    while read < requests * (3 << 20) {
        let n = soon("more", tokio::io::AsyncReadExt::read(&mut raw.0, &mut buffer)).await.unwrap();
        assert!(n > 0, "closed after {read} bytes");
        read += n;
        tokio::time::sleep(SHORT / 30).await;
    }
}

async fn one_connection_too_many_is_told_so(database: Database) {
    let site = Site::idle(&database, Options { connections_max: 2, ..patient() }).await;
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut raw = site.connect().await;
        raw.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        raw.read_until("true}").await;
        open.push(raw);
    }
    let mut third = site.connect().await;
    third.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let answer = third.read_to_end().await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
    let document = serde_json::from_str(body).unwrap();
    assert_eq!(crate::site::problem(503, &document), "503 too_many_connections");
    // The others go on, and there is room again when one has left.
    open[0].send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    open[0].read_until("true}").await;
    open.pop();
    let room = async { while site.get("/healthz").await.status != 200 {} };
    soon("room for another connection", room).await;
}

async fn many_silent_connections_do_not_hinder_the_rest(database: Database) {
    let site = Site::new(&database).await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(site.connect().await);
    }
    assert_eq!(site.start(r#"{"name":"echo","id":"a"}"#).await.status, 201);
    assert_eq!(site.result("a").await.status, 200);
}

/// Clients that go away in the middle of a start, at any byte of it or while it is decided: each start is admitted whole
/// or not at all, and on PostgreSQL no connection of ours is left in a transaction or beyond its bound.
async fn whoever_vanishes_leaves_nothing_half_done(database: Database) {
    const CLIENTS: usize = 400;
    // By which our connections are known.
    let name = database.url().rsplit(['=', '/']).next().unwrap().to_owned();
    let url = match database.file() {
        Some(_) => database.url(),
        None => format!("{}&application_name={name}", database.url()),
    };
    let site = Site::with(options(), Engine::open(&url).unwrap()).await;
    let request = |n: usize| {
        let body = format!(r#"{{"name":"echo","id":"v{n}","input":{n}}}"#);
        let head = "POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
        format!("{head}content-length: {}\r\n\r\n{body}", body.len())
    };
    for n in 0..CLIENTS {
        let request = request(n);
        // Every place to break off comes, and half of them send all and do not wait for the answer.
        let sent = if n % 2 == 0 { request.len() } else { n * 37 % request.len() };
        let mut raw = site.connect().await;
        raw.send(&request[..sent]).await;
        if n % 8 == 0 {
            tokio::task::yield_now().await;
        }
    }
    // It still serves, and whoever asks again is told the truth.
    for n in 0..CLIENTS {
        let again = site.start(format!(r#"{{"name":"echo","id":"v{n}","input":{n}}}"#)).await;
        assert!([200, 201].contains(&again.status), "v{n}: {}", again.body);
        if n % 2 == 1 {
            assert_eq!(again.status, 201, "v{n} was never asked for whole");
        }
        assert_eq!(site.result(&format!("v{n}")).await.json()["result"], n);
    }
    assert_eq!(site.ids().await.len(), CLIENTS);
    if database.file().is_none() {
        let ours = |what: &str| -> usize {
            let text = format!("select count(*) from pg_stat_activity where application_name = '{name}' {what}");
            psql(database.url().split_once('?').unwrap().0, &text).unwrap().trim().parse().unwrap()
        };
        let begin = Instant::now();
        while ours("and state like 'idle in transaction%'") > 0 {
            assert!(begin.elapsed() < PATIENCE, "a transaction was left open");
            tokio::time::sleep(SHORT / 10).await;
        }
        // Two that write and eight that look unless a URL says otherwise, and four that look after the node.
        let n = ours("");
        assert!((1..=14).contains(&n), "{n} connections");
    }
    let verified = site.engine.look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!((verified.fault_count, verified.workflows), (0, CLIENTS as u64));
}
