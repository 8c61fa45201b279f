//! The verbs on a real PostgreSQL, through the real binary.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{STUCK, Server, run, stderr, stdout, store};
use rusqlite::Connection;
use serde_json::Value;
use steadfast::core::text::{Namespace, WorkflowId, WorkflowKey};
use steadfast::store::conformance::dump;
use steadfast::store::postgres::PostgresReader;
use steadfast::store::sqlite::SqliteReader;
use steadfast::store::{Filter, Reader};
use steadfast_pgtest::{Authority, Bouncer, Cluster, Proxy, Shared, psql, shared};

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Runs statements as an administrator would; `SCHEMA` in them is the store's.
fn sql(url: &str, statements: &str) -> String {
    let (database, params) = url.split_once('?').unwrap();
    let schema = params.split('&').find_map(|pair| pair.strip_prefix("schema=")).unwrap();
    psql(database, &statements.replace("SCHEMA", schema)).unwrap().trim().to_owned()
}

/// A URL that nobody answers on.
fn nobody() -> String {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    format!("postgres://steadfast@{free}/postgres?schema=x")
}

fn key(id: &str) -> WorkflowKey {
    WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) }
}

fn everything(reader: &dyn Reader) -> String {
    dump(reader, &BTreeSet::from([Namespace::default_namespace()])).unwrap()
}

/// Ends a test's use of a schema; the cluster is shared by many.
struct Schema {
    url: String,
    _shared: Shared,
}

impl Schema {
    fn new() -> Self {
        let shared = shared();
        Self { url: shared.fresh_url(), _shared: shared }
    }

    fn is_there(&self) -> bool {
        sql(&self.url, "select to_regnamespace('SCHEMA') is not null") == "t"
    }
}

/// A file with ended, sleeping, blocked and failed workflows, and some that ran when their process was killed.
fn file_that_was_killed(data: &Path) {
    for _ in 0..20 {
        let server = Server::dev(data);
        let start = |args: &[&str]| {
            let output = run(Some(&server.url), args);
            assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        };
        start(&["start", "hello", "--id", "ended", "--input", r#"{"steps":2}"#, "--wait"]);
        start(&["start", "sleeper", "--id", "sleeping", "--input", r#"{"seconds":3600}"#]);
        let odd = r#"{"z":1e400,"n":123456789012345678901234,"d":0.10,"nul":"a\u0000b","ü":"😀"}"#;
        start(&["start", "nobody_knows", "--id", "with / and ü", "--input", odd, "--priority", "-7"]);
        start(&["start", "hello", "--id", "failed", "--input", r#"{"steps":0}"#]);
        for n in 0..6 {
            start(&["start", "hello", "--id", &format!("long-{n}"), "--input", r#"{"steps":1500}"#]);
        }
        server.kill();
        // A connection that could write would move the log into the file.
        let left = Connection::open_with_flags(store(data), rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
        let running: i64 =
            left.query_row("select count(*) from heads where status = 'running'", [], |row| row.get(0)).unwrap();
        if running > 0 {
            return;
        }
    }
    panic!("nothing ever ran when the process was killed");
}

#[test]
fn a_copied_store_has_everything_and_goes_on() {
    let (data, schema) = (tempfile::tempdir().unwrap(), Schema::new());
    file_that_was_killed(data.path());
    let file = store(data.path());
    let before = std::fs::read(&file).unwrap();
    let wal = std::fs::read(file.with_extension("db-wal")).unwrap();

    let output = run(None, &["copy", data.path().to_str().unwrap(), &schema.url, "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = json(&stdout(&output));
    for (member, value) in [("workflows", 10), ("receipts", 10), ("namespaces", 1), ("fault_count", 0), ("epoch", 2)] {
        assert_eq!(report[member], value, "{member}: {report}");
    }
    assert!(!stdout(&output).contains("steadfast@"), "{report}");
    assert!(std::fs::read(&file).unwrap() == before, "the file is as it was");
    assert!(std::fs::read(file.with_extension("db-wal")).unwrap() == wal, "and so is its log");
    let source = SqliteReader::open(&file).unwrap();
    let copy = PostgresReader::open(&schema.url).unwrap();
    assert_eq!(everything(&source), everything(&copy));
    let list = |reader: &dyn Reader| -> Vec<(i64, String)> {
        let page = reader.list(&Filter::all(Namespace::default_namespace()), None, 100).unwrap();
        page.items.into_iter().map(|item| (item.cursor.0, item.head.key.id.to_string())).collect()
    };
    assert_eq!(list(&source), list(&copy), "under the same numbers");
    let numbers = "select last_value from SCHEMA.workflow_numbers";
    assert_eq!(sql(&schema.url, numbers), "10");

    // What was told to callers of the file holds here.
    let server = Server::dev_on(&schema.url);
    let again = run(Some(&server.url), &["start", "hello", "--id", "ended", "--input", r#"{"steps":2.0}"#]);
    assert!(again.status.success() && stdout(&again).contains("started before"), "{}", stderr(&again));
    let changed = run(Some(&server.url), &["start", "hello", "--id", "ended", "--input", r#"{"steps":3}"#]);
    assert_eq!((changed.status.code(), stderr(&changed).contains("identity_conflict")), (Some(6), true));
    let new = run(Some(&server.url), &["start", "hello", "--id", "new", "--wait"]);
    assert!(new.status.success(), "{}", stderr(&new));
    assert_eq!(list(&copy)[0], (list(&copy)[0].0, "new".to_owned()), "a new number is past the old ones");
    for n in 0..6 {
        let id = format!("long-{n}");
        let ended = run(Some(&server.url), &["start", "hello", "--id", &id, "--input", r#"{"steps":1500}"#, "--wait"]);
        assert!(ended.status.success(), "{id}: {}", stderr(&ended));
    }
    let given_back: u32 = sql(
        &schema.url,
        "select count(*) from SCHEMA.events where type = 'step_failed' and payload::json ->> 'code' = 'given_back'
             and payload like '%belongs to an earlier life of the store%'",
    )
    .parse()
    .unwrap();
    assert!(given_back > 0, "what ran in the file was given back");
    assert_eq!(sql(&schema.url, "select epoch from SCHEMA.store"), "2", "opening it raises no further epoch");
    server.stop();
    let verified = run(None, &["verify", "--store", &schema.url]);
    assert!(verified.status.success(), "{}", stdout(&verified));

    // Once is enough, and people are told what to do with the file.
    let twice = run(None, &["copy", file.to_str().unwrap(), &schema.url]);
    assert_eq!((twice.status.code(), stderr(&twice).contains("target_not_empty")), (Some(6), true));
    let other = Schema::new();
    let told = run(None, &["copy", &format!("sqlite:{}", file.display()), &other.url]);
    assert!(stdout(&told).contains("put it away"), "{} {}", stdout(&told), stderr(&told));
}

#[test]
fn a_copy_that_cannot_be_leaves_nothing() {
    let (data, schema) = (tempfile::tempdir().unwrap(), Schema::new());
    let file = store(data.path());
    let file = file.to_str().unwrap();
    let owner = Server::dev(data.path());
    run(Some(&owner.url), &["start", "hello", "--id", "a", "--wait"]);
    let refused = |args: &[&str], code: i32, word: &str| {
        let output = run(None, args);
        let said = stderr(&output);
        assert_eq!((output.status.code(), said.contains(&format!("[{word}]"))), (Some(code), true), "{args:?}: {said}");
        said
    };
    let said = refused(&["copy", file, &schema.url], 1, "store_owned");
    assert!(said.contains(&format!("process {}", owner.pid())), "{said}");
    owner.stop();
    refused(&["copy", "/nowhere/x.db", &schema.url], 1, "store_foreign");
    assert!(!Path::new("/nowhere").exists());
    refused(&["copy", file, &format!("{}&committers=0", schema.url)], 6, "invalid_store");
    refused(&["copy", file, "mysql://x"], 6, "invalid_store");
    refused(&["copy", &schema.url, file], 6, "unsupported");
    refused(&["copy", &schema.url, &schema.url], 6, "unsupported");
    refused(&["copy", file, "b.db"], 6, "unsupported");
    let said = refused(&["copy", file, &nobody()], 8, "store_unavailable");
    assert!(said.contains("no server can be used: 127.0.0.1:"), "{said}");

    // A file that contradicts itself.
    let damaged = Connection::open(file).unwrap();
    damaged.execute_batch("update scratchpad set value = '99' where key = 'made'").unwrap();
    refused(&["copy", file, &schema.url], 3, "faults_found");
    // A row that means nothing there.
    damaged.execute_batch("pragma ignore_check_constraints = on; update heads set status = 'nonsense'").unwrap();
    refused(&["copy", file, &schema.url], 3, "faults_found");
    // A value that no column there can hold.
    damaged.execute_batch("update heads set status = 'completed', priority = 3000000000").unwrap();
    refused(&["copy", file, &schema.url], 1, "store_unavailable");
    assert!(!schema.is_there(), "nothing was left");

    // Another release's file, or schema.
    damaged
        .execute_batch("update heads set priority = 0; update scratchpad set value = '3' where key = 'made'")
        .unwrap();
    damaged.execute_batch("pragma user_version = 0").unwrap();
    refused(&["copy", file, &schema.url], 1, "store_foreign");
    damaged.execute_batch("pragma user_version = 1").unwrap();
    drop(damaged);
    sql(&schema.url, "create schema SCHEMA; create table SCHEMA.theirs (a int)");
    refused(&["copy", file, &schema.url], 1, "store_foreign");
    sql(&schema.url, "drop schema SCHEMA cascade");
    assert!(run(None, &["migrate", "--store", &schema.url]).status.success());
    sql(&schema.url, "update SCHEMA.store set version = 2");
    refused(&["copy", file, &schema.url], 1, "store_foreign");
    sql(&schema.url, "update SCHEMA.store set version = 1");

    // A target that somebody has open, though it is empty; then one that nobody has open any more.
    let node = Server::dev_on(&schema.url);
    refused(&["copy", file, &schema.url], 6, "target_in_use");
    node.kill();
    let theirs = "select encode(fingerprint_key, 'hex') from SCHEMA.store";
    let ours = Connection::open(file).unwrap();
    let ours: String = ours.query_row("select lower(hex(fingerprint_key)) from store", [], |row| row.get(0)).unwrap();
    assert_ne!(sql(&schema.url, theirs), ours);
    assert!(run(None, &["copy", file, &schema.url]).status.success());
    assert_eq!(sql(&schema.url, theirs), ours, "the secret of the receipts came along");
    assert_eq!(sql(&schema.url, "select count(*) from SCHEMA.nodes"), "0");
}

#[test]
fn a_copy_that_is_killed_leaves_nothing_and_can_be_made_again() {
    let (data, schema) = (tempfile::tempdir().unwrap(), Schema::new());
    let file = data.path().join("flights.db");
    let from = format!("sqlite:{}", file.display());
    let made = run(None, &["demo", "--rows", "1500", "--kills", "0", "--json", "--store", &from]);
    assert!(made.status.success(), "{}", stderr(&made));
    let mut nothing = 0;
    for n in 1..=8 {
        let mut command = std::process::Command::new(common::binary());
        command.args(["copy", &from, &schema.url]).stdout(std::process::Stdio::null());
        let mut child = command.stderr(std::process::Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(25 * n));
        child.kill().unwrap();
        let ended = child.wait().unwrap();
        if ended.success() {
            break;
        }
        // Its connection ends by itself, and with it the transaction.
        let ours = "select count(*) from pg_stat_activity where query like '%SCHEMA%' and pid <> pg_backend_pid()";
        while sql(&schema.url, ours) != "0" {
            std::thread::sleep(Duration::from_millis(10));
        }
        if schema.is_there() {
            // The kill came after the commit.
            break;
        }
        nothing += 1;
    }
    assert!(nothing > 0, "a copy was killed before its end");
    let again = run(None, &["copy", &from, &schema.url]);
    let was_there = stderr(&again).contains("target_not_empty");
    assert!(again.status.success() || was_there, "{}", stderr(&again));
    let verified = run(None, &["verify", "--store", &schema.url, "--json"]);
    let report = json(&stdout(&verified));
    assert_eq!((&report["workflows"], &report["fault_count"]), (&1_500.into(), &0.into()));
    println!("{nothing} copies were killed");
}

#[test]
fn a_copy_goes_through_a_pooler() {
    let (data, shared) = (tempfile::tempdir().unwrap(), shared());
    let server = Server::dev(data.path());
    run(Some(&server.url), &["start", "hello", "--id", "a", "--wait"]);
    server.stop();
    let bouncer = Bouncer::start(shared.port());
    let direct = shared.fresh_url();
    let url = bouncer.url(direct.split_once('?').unwrap().1);
    let copied = run(None, &["copy", data.path().to_str().unwrap(), &url]);
    assert!(copied.status.success(), "{}", stderr(&copied));
    let verified = run(None, &["verify", "--store", &direct, "--json"]);
    assert_eq!(json(&stdout(&verified))["workflows"], 1, "{}", stderr(&verified));
}

#[test]
fn a_schema_is_migrated_and_marked_as_restored() {
    let schema = Schema::new();
    let migrate = |args: &[&str]| {
        let output = run(None, &[&["migrate", "--json"], args].concat());
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        json(&stdout(&output))
    };
    let at = ["--store", &schema.url];
    let made = migrate(&at);
    assert_eq!((&made["had"], &made["has"], &made["restored"]), (&0.into(), &1.into(), &false.into()));
    assert_eq!(migrate(&at)["had"], 1);
    let epoch = || sql(&schema.url, "select epoch from SCHEMA.store");
    Server::dev_on(&schema.url).stop();
    assert_eq!(epoch(), "1");
    assert_eq!(migrate(&["--store", &schema.url, "--restored"])["restored"], true);
    Server::dev_on(&schema.url).stop();
    assert_eq!(epoch(), "2");
    Server::dev_on(&schema.url).stop();
    assert_eq!(epoch(), "2", "once");

    // The same on a file.
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().to_str().unwrap();
    let missing = run(None, &["migrate", "--data", folder]);
    assert_eq!((missing.status.code(), stderr(&missing).contains("store_foreign")), (Some(1), true));
    assert!(std::fs::read_dir(data.path()).unwrap().next().is_none(), "nothing is made beside what is not there");
    let server = Server::dev(data.path());
    let owned = run(None, &["migrate", "--data", folder, "--restored"]);
    assert_eq!((owned.status.code(), stderr(&owned).contains("store_owned")), (Some(1), true), "{}", stderr(&owned));
    server.stop();
    let epoch = || -> i64 {
        let file = Connection::open(store(data.path())).unwrap();
        file.query_row("select epoch from store", [], |row| row.get(0)).unwrap()
    };
    assert_eq!(migrate(&["--data", folder])["had"], 1);
    Server::dev(data.path()).stop();
    assert_eq!(epoch(), 1);
    migrate(&["--data", folder, "--restored"]);
    Server::dev(data.path()).stop();
    assert_eq!(epoch(), 2);
}

#[test]
fn damage_in_the_database_is_found() {
    let schema = Schema::new();
    let server = Server::dev_on(&schema.url);
    run(Some(&server.url), &["start", "hello", "--id", "a", "--wait"]);
    run(Some(&server.url), &["start", "sleeper", "--id", "s", "--input", r#"{"seconds":3600}"#]);
    // Beside a running node.
    let clean = run(None, &["verify", "--store", &schema.url, "--json"]);
    assert_eq!(clean.status.code(), Some(0), "{}", stderr(&clean));
    assert_eq!((&json(&stdout(&clean))["workflows"], &json(&stdout(&clean))["fault_count"]), (&2.into(), &0.into()));
    server.stop();
    for (damage, repair, fault) in [
        (
            "update SCHEMA.scratchpad set value = '99' where key = 'made'",
            "update SCHEMA.scratchpad set value = '3' where key = 'made'",
            "variable_differs",
        ),
        (
            "create table SCHEMA.kept as select * from SCHEMA.admissions; delete from SCHEMA.admissions where id = 'a'",
            "insert into SCHEMA.admissions select * from SCHEMA.kept where id = 'a'; drop table SCHEMA.kept",
            "head_without_receipt",
        ),
        (
            "create table SCHEMA.kept as select * from SCHEMA.events; delete from SCHEMA.events where seq = 2",
            "delete from SCHEMA.events; insert into SCHEMA.events select * from SCHEMA.kept; drop table SCHEMA.kept",
            "",
        ),
        (
            "update SCHEMA.heads set due = due + 1 where id = 's'",
            "update SCHEMA.heads set due = due - 1 where id = 's'",
            "",
        ),
        (
            "insert into SCHEMA.ready values (1, 1, 1, 'hello', 'start')",
            "delete from SCHEMA.ready where rank = 1",
            "row_without_ready",
        ),
    ] {
        sql(&schema.url, damage);
        let output = run(None, &["verify", "--store", &schema.url]);
        assert_eq!(output.status.code(), Some(3), "{damage}: {}", stderr(&output));
        assert!(stdout(&output).contains(fault), "{damage}: {}", stdout(&output));
        assert!(stderr(&output).contains("keep the schema as it is"), "{damage}: {}", stderr(&output));
        sql(&schema.url, repair);
        let repaired = run(None, &["verify", "--store", &schema.url]);
        assert_eq!(repaired.status.code(), Some(0), "{repair}: {}", stdout(&repaired));
    }
}

/// Rows of: arguments, exit code, parts of standard error.
#[test]
fn what_cannot_be_used_is_named() {
    let (schema, foreign, newer) = (Schema::new(), Schema::new(), Schema::new());
    sql(&foreign.url, "create schema SCHEMA; create table SCHEMA.theirs (a int)");
    assert!(run(None, &["migrate", "--store", &newer.url]).status.success());
    sql(&newer.url, "update SCHEMA.store set version = 99, oldest = 99");
    let nobody = nobody();
    let backup = tempfile::tempdir().unwrap();
    let backup = backup.path().join("b.db");
    let backup = backup.to_str().unwrap();
    for (args, code, parts) in [
        (vec!["verify", "--store", &schema.url], 1, ["store_foreign", "run serve or migrate"]),
        (vec!["verify", "--store", &foreign.url], 1, ["store_foreign", "another program"]),
        (vec!["verify", "--store", &newer.url], 1, ["store_foreign", "use a newer release"]),
        (vec!["verify", "--store", &nobody], 8, ["store_unavailable", "refused"]),
        (vec!["verify", "--store", "postgres://h/db?schema=Bad"], 6, ["invalid_store", "schema"]),
        (vec!["migrate", "--store", &foreign.url], 1, ["store_foreign", "another program"]),
        (vec!["migrate", "--store", &newer.url, "--restored"], 1, ["store_foreign", "use a newer release"]),
        (vec!["migrate", "--store", &nobody], 8, ["store_unavailable", "refused"]),
        (vec!["dev", "--listen", "127.0.0.1:0", "--store", &foreign.url], 1, ["store_foreign", "another program"]),
        (vec!["serve", "--listen", "127.0.0.1:0", "--store", &newer.url], 1, ["store_foreign", "use a newer release"]),
        (vec!["serve", "--listen", "127.0.0.1:0", "--store", &nobody], 8, ["store_unavailable", "refused"]),
        (vec!["backup", backup, "--store", &schema.url], 6, ["unsupported", "migrate --restored"]),
        (vec!["demo", "--rows", "5", "--store", &nobody], 8, ["store_unavailable", "refused"]),
        (vec!["demo", "--rows", "5", "--store", &foreign.url], 1, ["store_foreign", "another program"]),
        (vec!["bench", "postgres", "--store", &nobody], 8, ["store_unavailable", "refused"]),
        (vec!["demo", "--rows", "5", "--store", "mysql://x"], 6, ["invalid_store", "mysql"]),
        (vec!["demo", "--rows", "5", "--store", "x.db"], 6, ["invalid_store", "sqlite:x.db"]),
        (vec!["demo", "--rows", "5", "--store", "sqlite:x.db", "--data", "d"], 6, ["invalid_request", "--data"]),
    ] {
        let output = run(None, &args);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{args:?}: {said}");
    }
    assert!(!schema.is_there() && !Path::new(backup).exists(), "nothing was made");
}

#[test]
fn a_password_is_never_said() {
    // Nobody there asks for one, so it may be wrong.
    let schema = Schema::new();
    let url = schema.url.replace("steadfast@", "steadfast:s3cret@");
    for args in [
        vec!["migrate", "--store", &url],
        vec!["migrate", "--store", &url, "--json"],
        vec!["verify", "--store", &url, "--json"],
        vec!["copy", "/nowhere.db", &url],
        vec!["verify", "--store", "postgres://steadfast:s3cret@127.0.0.1:1/x"],
        vec!["migrate", "--help"],
        vec!["copy", "--help"],
    ] {
        let mut command = std::process::Command::new(common::binary());
        let output = command.args(&args).env("STEADFAST_STORE", &url).output().unwrap();
        assert!(!stdout(&output).contains("s3cret") && !stderr(&output).contains("s3cret"), "{args:?}");
    }
}

/// What is wrong with a command line was told by quoting it, and the password with it.
#[test]
fn what_is_not_understood_says_no_password() {
    let url = "postgres://steadfast:s3cret@127.0.0.1:1/x?schema=a";
    let verbs = [
        "demo",
        "dev",
        "serve",
        "start",
        "show",
        "events",
        "scratchpad",
        "list",
        "cancel",
        "verify",
        "backup",
        "copy",
        "migrate",
        "completions",
    ];
    for verb in verbs {
        for args in [&[verb, url, url, url, url][..], &[verb, "--nonsense", url], &[verb, &format!("--listen={url}")]] {
            let output = run(None, args);
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
            assert!(!said.contains("s3cret") && !stdout(&output).contains("s3cret"), "{args:?}: {said}");
        }
    }
    let output = run(None, &["verify", url]);
    assert!(stderr(&output).contains("unexpected argument 'postgres://..'"), "{}", stderr(&output));
    // Understood, and of no use.
    for (args, code) in [
        (&["backup", url, "--data", "/nowhere"][..], 1),
        (&["verify", "--data", url], 1),
        (&["list", "--server", url], 7),
        (&["list", "--server", "http://steadfast:s3cret@127.0.0.1:1/"], 7),
    ] {
        let output = run(None, args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(!stderr(&output).contains("s3cret"), "{args:?}: {}", stderr(&output));
    }
}

/// Trying again is no remedy: that is another exit code than for a database that is away.
#[test]
fn a_wrong_password_is_said_and_not_shown() {
    let cluster = Cluster::start(&[]);
    let hba = std::path::PathBuf::from(cluster.sql("show hba_file"));
    let rules = std::fs::read_to_string(&hba).unwrap();
    std::fs::write(&hba, format!("host all app 127.0.0.1/32 scram-sha-256\n{rules}")).unwrap();
    cluster.sql(
        "create role app login password 'r1ght'; grant create on database postgres to app; select pg_reload_conf()",
    );
    let url = |password: &str| cluster.url("schema=x").replace("steadfast@", &format!("app{password}@"));
    let (right, wrong, none) = (url(":r1ght"), url(":s3cret"), url(""));
    // Whoever is not asked for a password is let in: the rule is not in force yet.
    while run(None, &["migrate", "--store", &wrong]).status.success() {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(run(None, &["migrate", "--store", &right]).status.success());
    let data = tempfile::tempdir().unwrap();
    Server::dev(data.path()).stop();
    let file = data.path().to_str().unwrap();
    let elsewhere = wrong.replace("/postgres?", ",127.0.0.1:1/postgres?");
    for (args, code, part) in [
        (vec!["verify", "--store", &wrong], 1, "password authentication failed for user \"app\""),
        (vec!["verify", "--json", "--store", &wrong], 1, "password authentication failed for user"),
        (vec!["migrate", "--store", &wrong], 1, "password authentication failed for user \"app\""),
        (vec!["copy", file, &wrong], 1, "password authentication failed for user \"app\""),
        (vec!["serve", "--listen", "127.0.0.1:0", "--store", &wrong], 1, "password authentication failed"),
        (vec!["demo", "--rows", "5", "--store", &wrong], 1, "password authentication failed"),
        (vec!["verify", "--store", &none], 1, "password missing"),
        // One of two may be there later, and the right one.
        (vec!["verify", "--store", &elsewhere], 8, "password authentication failed"),
        (vec!["verify", "--store", &right.replace("/postgres?", "/absent?")], 1, "\"absent\" does not exist"),
    ] {
        let output = run(None, &args);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains("store_unavailable") && said.contains(part), "{args:?}: {said}");
        assert!(!said.contains("s3cret") && !stdout(&output).contains("s3cret"), "{args:?}: {said}");
    }
}

/// The server takes nothing else, and is known by the roots of the system.
#[test]
fn every_verb_goes_by_tls() {
    let (ours, other) = (Authority::named("ours"), Authority::named("other"));
    let cluster = Cluster::start(&[]);
    cluster.serve_tls(&ours.server(&["db.test"]), &ours, "hostssl all all 127.0.0.1/32 trust");
    let server = format!("postgres://steadfast@db.test:{}/postgres?hostaddr=127.0.0.1", cluster.port());
    let url = |schema: &str| format!("{server}&sslrootcert=system&schema={schema}");
    let verb = |authority: &Authority, args: &[&str]| {
        let mut command = std::process::Command::new(common::binary());
        command.args(args).env("SSL_CERT_FILE", authority.root()).env_remove("SSL_CERT_DIR");
        command
    };
    let data = tempfile::tempdir().unwrap();
    Server::dev(data.path()).stop();
    let (file, one, copy) = (data.path().to_str().unwrap(), url("one"), url("copy"));
    let works = |args: &[&str]| {
        let output = verb(&ours, args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    };
    works(&["migrate", "--store", &one]);
    let node = Server::start_on(verb(&ours, &["serve", "--store", &one]));
    node.stop();
    let node = Server::start_on(verb(&ours, &["dev", "--store", &one]));
    let started = run(Some(&node.url), &["start", "hello", "--id", "a", "--input", r#"{"steps":2}"#, "--wait"]);
    assert!(started.status.success(), "{}", stderr(&started));
    node.stop();
    works(&["verify", "--store", &one]);
    works(&["copy", file, &copy]);
    works(&["migrate", "--store", &copy, "--restored"]);
    let folder = data.path().join("demo");
    works(&["demo", "--rows", "5", "--kills", "0", "--store", &url("demo"), "--data", folder.to_str().unwrap()]);

    let unknown = verb(&other, &["verify", "--store", &one]).output().unwrap();
    let said = stderr(&unknown);
    assert_eq!(unknown.status.code(), Some(1), "{said}");
    assert!(said.contains("store_unavailable") && said.contains("from no CA that the system trusts"), "{said}");
    let roots = format!("{server}&sslmode=verify-full&sslrootcert=/nowhere/root.crt");
    let missing = run(None, &["verify", "--store", &roots]);
    assert_eq!(missing.status.code(), Some(6), "{}", stderr(&missing));
    assert!(stderr(&missing).contains("invalid_store"), "{}", stderr(&missing));
}

/// Also by what only reads: it may have fallen behind, and be promoted meanwhile.
#[test]
fn a_standby_is_no_store_for_now() {
    let cluster = Cluster::start(&[]);
    assert!(run(None, &["migrate", "--store", &cluster.url("")]).status.success());
    let standby = cluster.standby(false);
    for verb in ["verify", "migrate"] {
        let output = run(None, &[verb, "--store", &standby.url("")]);
        assert_eq!(output.status.code(), Some(8), "{verb}: {}", stderr(&output));
        assert!(stderr(&output).contains("it takes no writes now (a standby"), "{verb}: {}", stderr(&output));
    }
}

/// With the variable set a `--data` was refused, with words about a `--store` that nobody had typed.
#[test]
fn what_is_typed_wins_over_the_environment() {
    let (schema, data) = (Schema::new(), tempfile::tempdir().unwrap());
    Server::dev(data.path()).stop();
    let folder = data.path().to_str().unwrap();
    let migrate = |variable: &str, args: &[&str]| {
        let mut command = std::process::Command::new(common::binary());
        let command = command.args(["migrate", "--json"]).args(args).current_dir(data.path());
        command.env("STEADFAST_STORE", variable).output().unwrap()
    };
    let shown = |output: std::process::Output| {
        assert!(output.status.success(), "{}", stderr(&output));
        json(&stdout(&output))["store"].as_str().unwrap().to_owned()
    };
    let file = store(data.path()).display().to_string();
    assert_eq!(shown(migrate(&schema.url, &["--data", folder])), file);
    assert!(!schema.is_there());
    assert_eq!(shown(migrate("mysql://x", &["--store", &format!("sqlite:{file}")])), file);
    assert!(shown(migrate(&schema.url, &[])).starts_with("postgres://127.0.0.1"));
    let nothing = migrate("", &[]);
    assert!(stderr(&nothing).contains("./steadfast-data/steadfast.db"), "{}", stderr(&nothing));
    let both = migrate("", &["--data", folder, "--store", &schema.url]);
    assert_eq!((both.status.code(), stderr(&both).contains("--data")), (Some(2), true), "{}", stderr(&both));
}

#[test]
fn a_store_with_living_nodes_is_not_marked_as_restored() {
    let schema = Schema::new();
    let node = Server::dev_on(&schema.url);
    let mark = || run(None, &["migrate", "--restored", "--store", &schema.url]);
    let refused = mark();
    assert_eq!(refused.status.code(), Some(6), "{}", stderr(&refused));
    let said = stderr(&refused);
    assert!(said.contains("[store_in_use]") && said.contains("in use by 1 node"), "{said}");
    assert!(said.contains("stop") && !said.contains("steadfast@"), "{said}");
    assert_eq!(sql(&schema.url, "select copied from SCHEMA.store"), "f");
    // Without the mark it is only brought to this release, which nodes bear.
    assert!(run(None, &["migrate", "--store", &schema.url]).status.success());
    // One that was killed on this machine is seen to be gone.
    node.kill();
    let marked = mark();
    assert!(marked.status.success(), "{}", stderr(&marked));
    assert_eq!(sql(&schema.url, "select copied from SCHEMA.store"), "t");
}

/// A schema of its own is all that the role needs.
#[test]
fn a_role_that_owns_its_schema_is_enough() {
    let (schema, data) = (Schema::new(), tempfile::tempdir().unwrap());
    let role = format!("r{}", schema.url.rsplit_once('=').unwrap().1);
    sql(&schema.url, &format!("create role {role} login; create schema SCHEMA authorization {role}"));
    let url = schema.url.replace("steadfast@", &format!("{role}@"));
    let server = Server::dev(data.path());
    run(Some(&server.url), &["start", "hello", "--id", "a", "--wait"]);
    server.stop();
    let copied = run(None, &["copy", data.path().to_str().unwrap(), &url]);
    assert!(copied.status.success(), "{}", stderr(&copied));
    let server = Server::dev_on(&url);
    let ended = run(Some(&server.url), &["start", "hello", "--id", "b", "--wait"]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    server.kill();
    Server::dev_on(&url).stop();
    let verified = run(None, &["verify", "--store", &url]);
    assert!(verified.status.success(), "{}", stderr(&verified));
    // A role that may only use it runs it just as well.
    let user = format!("{role}_user");
    sql(
        &schema.url,
        &format!(
            "create role {user} login; grant usage on schema SCHEMA to {user};
             grant select, insert, update, delete on all tables in schema SCHEMA to {user};
             grant usage on all sequences in schema SCHEMA to {user}"
        ),
    );
    let server = Server::dev_on(&schema.url.replace("steadfast@", &format!("{user}@")));
    let ended = run(Some(&server.url), &["start", "hello", "--id", "c", "--wait"]);
    assert!(ended.status.success(), "{}", stderr(&ended));
    server.stop();
    let served = "select count(*) from SCHEMA.admissions where id = 'c'";
    assert_eq!(sql(&schema.url, served), "1");
    sql(&schema.url, &format!("drop owned by {user}; drop role {user}"));

    sql(&schema.url, &format!("drop schema SCHEMA cascade; create schema SCHEMA authorization {role}"));
    let migrated = run(None, &["migrate", "--store", &url]);
    assert!(migrated.status.success(), "{}", stderr(&migrated));
    // A role that has no schema may not make one, and is told so.
    sql(&schema.url, "drop schema SCHEMA cascade");
    let refused = run(None, &["migrate", "--store", &url]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("permission denied for database"), "{}", stderr(&refused));
    sql(&schema.url, &format!("drop role {role}"));
}

#[test]
fn two_nodes_import_the_demo_and_are_killed_in_turns() {
    let (schema, data) = (Schema::new(), tempfile::tempdir().unwrap());
    let folder = data.path().join("new");
    let url = schema.url.replace("steadfast@", "steadfast:s3cret@");
    let args =
        ["demo", "--rows", "1500", "--kills", "4", "--json", "--store", &url, "--data", folder.to_str().unwrap()];
    let output = run(None, &args);
    assert!(output.status.success(), "{} {}", stdout(&output), stderr(&output));
    let report = json(&stdout(&output));
    for (member, value) in
        [("rows", 1_500), ("workflows", 1_500), ("lost", 0), ("doubled", 0), ("faults", 0), ("kills", 4), ("nodes", 2)]
    {
        assert_eq!(report[member], value, "{member}: {report}");
    }
    let (completed, failed) = (report["completed"].as_u64().unwrap(), report["failed"].as_u64().unwrap());
    assert_eq!(completed + failed, 1_500);
    let csv = std::fs::read_to_string(report["output"].as_str().unwrap()).unwrap();
    assert_eq!(csv.lines().count() as u64, completed + 1, "a line for each, and the heading");
    let shown = report["store"].as_str().unwrap();
    assert!(shown.starts_with("postgres://127.0.0.1") && !stdout(&output).contains("s3cret"), "{report}");
    // Two at first, and one more after each kill; each handed rows over and ran steps.
    let boots: u32 = sql(&schema.url, "select boot from SCHEMA.store").parse().unwrap();
    assert!(boots >= 6, "{boots}");
    let workers: u32 = sql(
        &schema.url,
        "select count(distinct payload::json ->> 'worker') from SCHEMA.events where type = 'step_started'",
    )
    .parse()
    .unwrap();
    assert!(workers >= 2, "{workers}");
    let left: u32 = sql(&schema.url, "select count(*) from SCHEMA.nodes").parse().unwrap();
    assert!(left <= 4, "{left} nodes have not left, and 4 were killed");
    let again = run(None, &["demo", "--rows", "5", "--store", &schema.url]);
    assert_eq!(again.status.code(), Some(1), "a store with workflows is refused");
    assert!(stderr(&again).contains("1500 workflows"), "{}", stderr(&again));
}

/// The store that the environment names is taken, unless a folder is given; the password need not be typed.
#[test]
fn the_demo_takes_the_store_that_the_environment_names() {
    let (schema, data) = (Schema::new(), tempfile::tempdir().unwrap());
    let url = schema.url.replace("steadfast@", "steadfast:s3cret@");
    let demo = |args: &[&str]| {
        let mut command = std::process::Command::new(common::binary());
        let command = command.args(["demo", "--rows", "20", "--kills", "0"]).args(args).current_dir(data.path());
        command.env("STEADFAST_STORE", &url).output().unwrap()
    };
    let in_folder = demo(&["--data", "new", "--json"]);
    assert!(in_folder.status.success(), "{}", stderr(&in_folder));
    assert_eq!(json(&stdout(&in_folder))["store"], "new/flights.db");
    assert!(!schema.is_there());
    let named = demo(&[]);
    assert!(named.status.success(), "{}", stderr(&named));
    let said = stdout(&named);
    assert!(said.contains("store   postgres://127.0.0.1") && said.contains("with STEADFAST_STORE as it is"), "{said}");
    assert!(!said.contains("s3cret") && !stderr(&named).contains("s3cret"), "{said}");
    let again = demo(&[]);
    assert_eq!(again.status.code(), Some(1));
    assert!(
        stderr(&again).contains("20 workflows") && stderr(&again).contains("STEADFAST_STORE"),
        "{}",
        stderr(&again)
    );
}

/// The first node was ended because the second one failed, and that was told as the reason.
#[test]
fn a_demo_that_cannot_go_on_says_why() {
    let (schema, data) = (Schema::new(), tempfile::tempdir().unwrap());
    let demo = |args: &[&str]| run(None, &[&["demo", "--rows", "20", "--kills", "0"], args].concat());
    let file = format!("sqlite:{}", data.path().join("flights.db").display());
    assert!(demo(&["--store", &file]).status.success());
    let rows = SqliteReader::open(data.path().join("flights.db")).unwrap();
    let mut ids: Vec<String> = (rows.list(&Filter::all(Namespace::default_namespace()), None, 100).unwrap().items)
        .into_iter()
        .map(|item| item.head.key.id.to_string())
        .collect();
    ids.sort();
    // The second row is the first one of the second node.
    assert!(run(None, &["migrate", "--store", &schema.url]).status.success());
    sql(
        &schema.url,
        &format!(
            "create function SCHEMA.no() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
             create trigger no before insert on SCHEMA.admissions for each row when (new.id = '{}')
                 execute function SCHEMA.no()",
            ids[1]
        ),
    );
    let failed = demo(&["--store", &schema.url, "--data", data.path().join("new").to_str().unwrap()]);
    let said = stderr(&failed);
    assert_eq!(failed.status.code(), Some(1), "{said}");
    assert!(said.contains("not this one") && said.contains("ended by itself three times"), "{said}");
    assert!(!said.contains("was ended") && !said.contains("the other importer"), "{said}");
}

/// Looked up by a name of its own, so that a node that ran before is waited for.
#[test]
fn what_two_nodes_admit_is_run_by_either() {
    let schema = Schema::new();
    let (one, other) = (Server::dev_on(&schema.url), Server::dev_on(&schema.url));
    for n in 0..20 {
        let id = format!("w-{n}");
        let server = if n % 2 == 0 { &one } else { &other };
        assert!(run(Some(&server.url), &["start", "hello", "--id", &id]).status.success());
    }
    // The one that is left does what the killed one held, and waits for no lease.
    one.kill();
    let begin = Instant::now();
    for n in 0..20 {
        let id = format!("w-{n}");
        let ended = run(Some(&other.url), &["start", "hello", "--id", &id, "--wait"]);
        assert!(ended.status.success(), "{id}: {}", stderr(&ended));
    }
    assert!(begin.elapsed() < STUCK.min(Duration::from_secs(25)), "nobody waited for a lease");
    other.stop();
    let reader = PostgresReader::open(&schema.url).unwrap();
    assert!(reader.head(&key("w-0")).unwrap().is_some());
    assert_eq!(reader.verify(&mut |_| {}).unwrap().faults, []);
}

/// A migration that was interrupted left its lock behind on a connection that a pooler kept. It ends with its transaction,
/// whatever ends that: a process that is killed, or a connection that is cut, before a pooler and behind one.
#[test]
fn a_migration_that_is_interrupted_leaves_no_lock_behind() {
    let cluster = Cluster::start(&[]);
    let (bouncer, proxy) = (Bouncer::start(cluster.port()), Proxy::start(cluster.port()));
    let wait_for = |what: &str, question: &str, answer: &str| {
        let begin = Instant::now();
        while cluster.sql(question) != answer {
            assert!(begin.elapsed() < STUCK, "{what}: {}", cluster.sql("select * from pg_locks"));
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let locks = "select count(*) from pg_locks where locktype = 'advisory' and granted";
    let asleep = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'";
    for (schema, url, is_cut) in [
        ("killed", cluster.url("schema=killed"), false),
        ("pooled", bouncer.url("schema=pooled"), false),
        ("cut", proxy.url("schema=cut"), true),
    ] {
        // Somebody is about to make the schema, and the migration waits for what becomes of that.
        let text = format!("begin; create schema {schema}; select pg_sleep(100); rollback");
        std::thread::scope(|scope| {
            scope.spawn(|| psql(&cluster.url(""), &text).expect_err("it is ended"));
            wait_for("nobody makes the schema", asleep, "1");
            let mut migration = std::process::Command::new(common::binary());
            migration.args(["migrate", "--store", &url]).stderr(std::process::Stdio::null());
            let mut migration = migration.spawn().unwrap();
            wait_for("it is in the middle", locks, "1");
            if schema == "pooled" {
                // It gives way, and the connection goes back to the pool for a moment.
                wait_for("it gives way", locks, "0");
                wait_for("it tries again", locks, "1");
            }
            if is_cut {
                proxy.sever();
                assert!(!migration.wait().unwrap().success(), "it was cut off");
            } else {
                migration.kill().unwrap();
                migration.wait().unwrap();
            }
            wait_for("a lock is left", locks, "0");
            cluster.sql("select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'");
        });
        let begin = Instant::now();
        let server = Server::dev_on(&url);
        assert!(begin.elapsed() < Duration::from_secs(20), "{schema}: the next server waited {:?}", begin.elapsed());
        server.stop();
        wait_for("the next server leaves a lock", locks, "0");
    }
}
