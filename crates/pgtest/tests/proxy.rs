//! The proxy: what passes, and what does not.

mod owner;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use owner::within;
use steadfast_pgtest::{Cluster, Cut, Proxy, Shared, psql, shared};

const SOON: Duration = Duration::from_secs(30);

static SHARED: LazyLock<Shared> = LazyLock::new(shared);

/// A table of one's own in the shared cluster, and a proxy before it.
struct Scene {
    proxy: Proxy,
    table: String,
}

fn scene() -> Scene {
    let schema = SHARED.fresh_url().split_once("?schema=").unwrap().1.to_owned();
    let scene = Scene { proxy: Proxy::start(SHARED.port()), table: format!("{schema}.rows") };
    scene.direct(&format!("create schema {schema}; create table {} (id int primary key)", scene.table));
    scene
}

impl Scene {
    fn direct(&self, statements: &str) -> String {
        psql(&format!("postgres://steadfast@127.0.0.1:{}/postgres", SHARED.port()), statements).unwrap()
    }

    fn ids(&self) -> String {
        self.direct(&format!("select string_agg(id::text, ' ' order by id) from {}", self.table))
    }

    /// Inserts a row in a transaction, each statement a query of its own.
    fn insert(&self, id: u32) -> Result<String, String> {
        let statements = format!("begin; insert into {} values ({id}); commit; select 'answered'", self.table);
        psql(&self.proxy.url(""), &statements)
    }
}

#[test]
fn a_commit_is_cut_before_the_server_or_after_it() {
    let scene = scene();
    assert_eq!(scene.insert(1).as_deref(), Ok("answered"));

    scene.proxy.cut_commits(Cut::Before, 2);
    scene.insert(2).unwrap_err();
    scene.insert(3).unwrap_err();
    assert_eq!(scene.insert(4).as_deref(), Ok("answered"));
    assert_eq!((scene.ids().as_str(), scene.proxy.cuts()), ("1 4", 2));

    scene.proxy.cut_commits(Cut::After, 1);
    scene.insert(5).unwrap_err();
    assert_eq!((scene.ids().as_str(), scene.proxy.cuts()), ("1 4 5", 3), "it was committed before it was cut");
    assert_eq!(scene.insert(6).as_deref(), Ok("answered"));

    // What the server refuses is lost too.
    scene.direct(&format!(
        "create table {table}_twice (id int unique deferrable initially deferred)",
        table = scene.table
    ));
    scene.proxy.cut_commits(Cut::After, 1);
    let refused =
        psql(&scene.proxy.url(""), &format!("begin; insert into {}_twice values (1), (1); commit", scene.table));
    assert!(!refused.unwrap_err().contains("duplicate key"), "the answer did not pass");
    assert_eq!(scene.proxy.cuts(), 4);
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    [&[tag][..], &(body.len() as u32 + 4).to_be_bytes(), body].concat()
}

/// Parse, Bind, Execute of a nameless statement.
fn extended(statement: &str) -> Vec<u8> {
    let parse = [b"\0", statement.as_bytes(), b"\0\0\0"].concat();
    [message(b'P', &parse), message(b'B', &[0; 8]), message(b'E', &[0; 5])].concat()
}

/// A client that sends much before it listens, as drivers do and psql does not. What it hears up to the end.
fn pipeline(proxy: &Proxy, bytes: &[u8], piece: usize) -> Vec<u8> {
    let mut socket = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    socket.set_nodelay(true).unwrap();
    let start = [&196_608u32.to_be_bytes()[..], b"user\0steadfast\0database\0postgres\0\0"].concat();
    socket.write_all(&[&(start.len() as u32 + 4).to_be_bytes()[..], &start].concat()).unwrap();
    let mut heard = Vec::new();
    // Until the server is ready.
    while !heard.ends_with(&message(b'Z', b"I")) {
        let mut piece = [0; 1024];
        let length = socket.read(&mut piece).unwrap();
        heard.extend_from_slice(&piece[..length]);
    }
    heard.clear();
    for piece in bytes.chunks(piece) {
        // Cut in the middle of what it says, it hears what was said to it before.
        if socket.write_all(piece).is_err() {
            break;
        }
        thread::sleep(Duration::from_micros(200));
    }
    // A reset ends it as well.
    drop(socket.read_to_end(&mut heard));
    heard
}

#[test]
fn a_pipelined_commit_is_cut_too() {
    let scene = scene();
    let sync = || message(b'S', b"");
    let leave = || message(b'X', b"");
    let insert = |id: u32| extended(&format!("insert into {} values ({id})", scene.table));
    let heard = |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    // Everything in one batch; and an earlier batch whose failure is not the answer to the COMMIT.
    let one = |id| [extended("begin"), insert(id), extended("COMMIT"), sync(), leave()].concat();
    let two = |id| {
        [extended("select 1/0"), sync(), extended("begin"), insert(id), extended("commit"), sync(), leave()].concat()
    };

    for piece in [7, 10_000] {
        let id = piece as u32;
        assert!(heard(&pipeline(&scene.proxy, &one(id), piece), "COMMIT"));
        scene.proxy.cut_commits(Cut::Before, 1);
        assert!(!heard(&pipeline(&scene.proxy, &one(id + 1), piece), "COMMIT"));
        scene.proxy.cut_commits(Cut::After, 2);
        assert!(!heard(&pipeline(&scene.proxy, &one(id + 2), piece), "COMMIT"));
        let answers = pipeline(&scene.proxy, &two(id + 3), piece);
        assert!(heard(&answers, "division by zero") && !heard(&answers, "COMMIT"));
    }
    assert_eq!((scene.ids().as_str(), scene.proxy.cuts()), ("7 9 10 10000 10002 10003", 6));
}

#[test]
fn connections_are_cut_refused_stalled_and_sent_elsewhere() {
    let scene = scene();
    let proxy = &scene.proxy;
    let sleep = || {
        let url = proxy.url(&format!("application_name={}", scene.table));
        thread::spawn(move || psql(&url, "select pg_sleep(30)"))
    };
    // The server of one that was cut sleeps on, because it looks at its connection only when it wakes.
    let sleeps = |count: &str| {
        let question = format!(
            "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and application_name = '{}'",
            scene.table
        );
        within(SOON, "a client sleeps", || scene.direct(&question) == count);
    };

    let sleeping = sleep();
    sleeps("1");
    proxy.sever();
    sleeping.join().unwrap().unwrap_err();

    proxy.refuse(true);
    psql(&proxy.url(""), "select 1").unwrap_err();
    proxy.refuse(false);
    assert_eq!(psql(&proxy.url(""), "select 1").as_deref(), Ok("1"));

    proxy.stall(true);
    let url = proxy.url("");
    let stalled = thread::spawn(move || psql(&url, "select 2"));
    thread::sleep(Duration::from_millis(300));
    assert!(!stalled.is_finished());
    proxy.stall(false);
    assert_eq!(stalled.join().unwrap().as_deref(), Ok("2"));

    // A stalled one can be cut.
    proxy.stall(true);
    let url = proxy.url("");
    let stalled = thread::spawn(move || psql(&url, "select 2"));
    thread::sleep(Duration::from_millis(300));
    proxy.sever();
    stalled.join().unwrap().unwrap_err();
    proxy.stall(false);

    let other = Cluster::start(&[]);
    let sleeping = sleep();
    sleeps("2");
    proxy.retarget(other.port());
    sleeping.join().unwrap().unwrap_err();
    assert_eq!(psql(&proxy.url(""), "show port").unwrap(), other.port().to_string());
}
