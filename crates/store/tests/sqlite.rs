//! What SQLite's store promises beyond the contract: its file, its statements, what they cost.

mod harness;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use harness::{At, SECRET};
use rusqlite::Connection;
use steadfast_core::claim::{Announced, Held, Steps, Terms};
use steadfast_core::command::{Command, Moment, Outcome};
use steadfast_core::commit::{self, Complete, Continuation, When};
use steadfast_core::event::Writes;
use steadfast_core::head::WorkerRef;
use steadfast_core::json::Json;
use steadfast_core::limits::Limits;
use steadfast_core::options::{Options, StartOptions};
use steadfast_core::snapshot::{Snapshot, Wants};
use steadfast_core::text::{Key, Name, Namespace, Step, WorkflowId, WorkflowKey};
use steadfast_core::{admission, sweep};
use steadfast_store::clock::ManualClock;
use steadfast_store::conformance::{Applied, DAY_ONE, Diary, apply};
use steadfast_store::sqlite::{self, SqliteReader, SqliteStore};
use steadfast_store::{Reader, Store, StoreError, Writer};
use tempfile::TempDir;

fn folder() -> TempDir {
    TempDir::new().expect("a folder for tests")
}

fn open(path: &Path) -> Result<SqliteStore, StoreError> {
    SqliteStore::open_with(path, Arc::new(ManualClock::new(DAY_ONE)), || Ok(SECRET))
}

/// Tells a page on the store at `path` and lets it go.
fn tell(path: &Path, page: &str) {
    let mut diary = Diary::begin(Box::new(At(path.to_path_buf())));
    diary.tell(page);
    diary.end();
}

fn raw(path: &Path) -> Connection {
    Connection::open(path).expect("the file opens")
}

fn key(namespace: &str, id: &str) -> WorkflowKey {
    WorkflowKey { namespace: Namespace::trusted(namespace), id: WorkflowId::trusted(id) }
}

fn start(key: WorkflowKey, input: &str, claim: Option<Terms>) -> Command {
    let asked = admission::Asked {
        key,
        name: Name::trusted("flow"),
        input: Json::parse(input).expect("JSON"),
        writes: Writes::default(),
        options: StartOptions::default(),
    };
    let start = asked.check(&Options::default(), &SECRET, &Limits::default()).expect("a sound request");
    Command::Start(Box::new(admission::Start { claim, ..start }))
}

// ---- statements ----

/// Each statement of the writer, and the way it takes: one search in the index it was written for, nothing sorted.
#[test]
fn every_hot_statement_uses_its_index() {
    let ways = [
        ("HEAD_BY_NUMBER", "SEARCH heads USING PRIMARY KEY (namespace=? AND workflow=?)"),
        ("ADMISSION", "SEARCH admissions USING PRIMARY KEY (namespace=? AND id=?)"),
        ("EVENT", "SEARCH events USING INDEX sqlite_autoindex_events_1 (namespace=? AND workflow=? AND seq=?)"),
        ("READY", "SEARCH heads USING COVERING INDEX heads_ready (namespace=? AND name=? AND step=? AND rank>?)"),
        ("READY_STEP", "SEARCH heads USING COVERING INDEX heads_ready (namespace=? AND name=? AND step>?)"),
        ("DUE", "SEARCH heads USING INDEX heads_timed (wake=? AND due<?)"),
        ("OPEN", "SEARCH heads USING INDEX heads_timed (wake=? AND (due,namespace,workflow)>(?,?,?))"),
        ("CALL", "SEARCH claim_calls USING PRIMARY KEY (namespace=? AND request=?)"),
        ("SIGNAL", "SEARCH signals USING INDEX signals_by_id (namespace=? AND workflow=? AND id=?)"),
        ("LAST_SIGNAL", "SEARCH signals USING PRIMARY KEY (namespace=? AND workflow=?)"),
        ("PENDING", "SEARCH signals USING INDEX signals_pending (namespace=? AND workflow=? AND name=? AND number>?)"),
        ("INSERT_SIGNAL", ""),
        ("TAKE_SIGNAL", "SEARCH signals USING PRIMARY KEY (namespace=? AND workflow=? AND number=?)"),
        ("INSERT_ADMISSION", ""),
        ("INSERT_EVENT", ""),
        ("INSERT_HEAD", ""),
        ("UPDATE_HEAD_IN_PLACE", "SEARCH heads USING PRIMARY KEY (namespace=? AND workflow=?)"),
        ("UPDATE_HEAD", "SEARCH heads USING PRIMARY KEY (namespace=? AND workflow=?)"),
        ("UPSERT_VARIABLE", ""),
        ("DELETE_VARIABLE", "SEARCH scratchpad USING PRIMARY KEY (namespace=? AND workflow=? AND key=?)"),
        ("INSERT_CALL", ""),
        ("FORGET_CALLS", "SEARCH claim_calls USING INDEX claim_calls_by_age (at<?)"),
    ];
    assert_eq!(plans(sqlite::hot_statements()), ways.map(|(name, way)| (name, way.to_owned())));
}

/// And those of looks: none reads more than it answers, none sorts.
#[test]
fn every_look_uses_its_index() {
    let ways = [
        (
            "NUMBER",
            "SEARCH a USING PRIMARY KEY (namespace=? AND id=?); SCALAR SUBQUERY 1; SEARCH namespaces USING COVERING INDEX sqlite_autoindex_namespaces_1 (name=?)",
        ),
        ("ADMISSION", "SEARCH admissions USING PRIMARY KEY (namespace=? AND id=?)"),
        ("LOG", "SEARCH events USING INDEX sqlite_autoindex_events_1 (namespace=? AND workflow=? AND seq>?)"),
        ("VARIABLE", "SEARCH scratchpad USING PRIMARY KEY (namespace=? AND workflow=? AND key=?)"),
        ("PAD", "SEARCH scratchpad USING PRIMARY KEY (namespace=? AND workflow=? AND key>?)"),
        ("INBOX", "SEARCH signals USING INDEX signals_inbox (namespace=? AND workflow=? AND number>?)"),
        ("NEXT_DUE", "SEARCH heads USING COVERING INDEX heads_timed (wake=? AND due>?)"),
        ("LIST", "SEARCH heads USING PRIMARY KEY (namespace=? AND workflow<?)"),
        ("LIST of a name", "SEARCH heads USING INDEX heads_by_name (namespace=? AND name=? AND workflow<?)"),
        (
            "LIST of what ended badly",
            "SEARCH heads USING INDEX heads_ended_badly (namespace=? AND status=? AND workflow<?)",
        ),
    ];
    assert_eq!(plans(sqlite::look_statements()), ways.map(|(name, way)| (name, way.to_owned())));
}

/// How SQLite carries statements out.
fn plans(statements: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
    let folder = folder();
    let path = folder.path().join("a.db");
    drop(open(&path).expect("it opens"));
    let connection = raw(&path);
    statements
        .into_iter()
        .map(|(name, text)| {
            let mut statement = connection.prepare(&format!("explain query plan {text}")).expect("it is sound");
            for parameter in 1..=statement.parameter_count() {
                statement.raw_bind_parameter(parameter, 1).expect("a parameter");
            }
            let mut rows = statement.raw_query();
            let mut way = Vec::new();
            while let Some(row) = rows.next().expect("a plan") {
                way.push(row.get::<_, String>(3).expect("a line of the plan"));
            }
            (name, way.join("; "))
        })
        .collect()
}

/// A statement that makes a table for itself costs several times its row: a check or an index condition with a list
/// of more than two does that at every change.
#[test]
fn no_hot_statement_makes_a_table_of_its_own() {
    let folder = folder();
    let path = folder.path().join("a.db");
    drop(open(&path).expect("it opens"));
    let connection = raw(&path);
    for (name, text) in sqlite::hot_statements() {
        let mut statement = connection.prepare(&format!("explain {text}")).expect("it is sound");
        for parameter in 1..=statement.parameter_count() {
            statement.raw_bind_parameter(parameter, 1).expect("a parameter");
        }
        let mut rows = statement.raw_query();
        while let Some(row) = rows.next().expect("a program") {
            let operation: String = row.get(1).expect("an operation");
            assert!(!operation.contains("Ephemeral"), "{name}");
        }
    }
}

/// An update of a head that keeps its place touches no index: the other one names the indexed columns, it does not.
#[test]
fn a_head_in_place_names_no_indexed_column() {
    let statements: BTreeMap<&str, String> = sqlite::hot_statements().into_iter().collect();
    for column in ["rank =", "wake =", "due =", "set status", ", status ="] {
        let named = |statement: &str| statements[statement].contains(column);
        assert!(!named("UPDATE_HEAD_IN_PLACE"), "{column}");
    }
}

// ---- the file ----

#[test]
fn the_schema() {
    let folder = folder();
    let path = folder.path().join("a.db");
    drop(open(&path).expect("it opens"));
    let connection = raw(&path);
    let mut statement = connection
        .prepare("select sql from sqlite_schema where sql is not null order by type = 'view', rowid")
        .expect("it is sound");
    let texts: Vec<String> =
        statement.query_map([], |row| row.get(0)).expect("a schema").collect::<Result<_, _>>().expect("texts");
    insta::assert_snapshot!(texts.join(";\n\n"));
    let loose: Vec<String> = connection
        .prepare("select name from pragma_table_list where type = 'table' and not strict and name not like 'sqlite%'")
        .expect("it is sound")
        .query_map([], |row| row.get(0))
        .expect("a list")
        .collect::<Result<_, _>>()
        .expect("names");
    assert_eq!(loose, Vec::<String>::new(), "every table is strict");
}

#[test]
fn migrations_run_twice_without_harm() {
    let folder = folder();
    let path = folder.path().join("a.db");
    let schema = || -> (i64, i64, String) {
        let connection = raw(&path);
        let number = |text: &str| connection.query_row(text, [], |row| row.get(0)).expect("a number");
        let schema = "select group_concat(sql, ';') from (select sql from sqlite_schema order by rowid)";
        let schema = connection.query_row(schema, [], |row| row.get(0)).expect("a schema");
        (number("pragma user_version"), number("select count(*) from namespaces"), schema)
    };
    tell(&path, "start blue/w1      started");
    let once = schema();
    tell(&path, "start blue/w1      replay of 0s");
    assert_eq!(schema(), once);
    assert_eq!((once.0, once.1), (1, 2));
}

#[test]
fn one_process_owns_a_store() {
    let folder = folder();
    let path = folder.path().join("a.db");
    let owner = open(&path).expect("it opens");
    let error = open(&path).expect_err("it is owned");
    assert_eq!(error.code(), "store_owned");
    let text = error.to_string();
    let wanted = format!("the store {} is in use by process {}; one process owns", path.display(), std::process::id());
    assert!(text.starts_with(&wanted), "{text}");
    // Reading and backing up need no ownership.
    SqliteReader::open(&path).expect("readers are let in");
    sqlite::backup(&path, &folder.path().join("b.db")).expect("backups are made");
    drop(owner);
    let next = open(&path).expect("it is free");
    assert_eq!(next.identity().boot, 2);
}

#[test]
fn the_files_of_others_are_refused_and_left_alone() {
    let folder = folder();
    let other = folder.path().join("other.db");
    raw(&other).execute_batch("create table users (name text); insert into users values ('Ada');").expect("a file");
    let named = folder.path().join("named.db");
    raw(&named).execute_batch("pragma application_id = 77; pragma user_version = 1;").expect("a file");
    let newer = folder.path().join("newer.db");
    tell(&newer, "start w1      started");
    raw(&newer).execute_batch("pragma user_version = 99; pragma journal_mode = delete;").expect("a file");
    let text = folder.path().join("text.db");
    std::fs::write(&text, "this is no database, although it is long enough to hold the header of one\n".repeat(10))
        .expect("a file");
    std::fs::remove_file(folder.path().join("newer.db.lock")).expect("it was there");
    let before = contents(folder.path());
    for (path, problem) in [
        (&other, "it is an SQLite file of another program; give another path"),
        (&named, "it is an SQLite file of another program; give another path"),
        (&newer, "its schema is version 99, this release knows 1; use a newer release"),
        (&text, "it is not an SQLite file; give another path"),
    ] {
        let error = open(path).expect_err("it is refused");
        assert_eq!(error.code(), "store_foreign");
        assert_eq!(error.to_string(), format!("{} cannot be opened as a store: {problem}", path.display()));
        let error = SqliteReader::open(path).expect_err("reading is refused too");
        assert!(matches!(error.code(), "store_foreign" | "store_unavailable"), "{error}");
    }
    assert!(before == contents(folder.path()), "every file is as it was, and there is no other");
}

fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let files = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    files.map(|path| (path.clone(), std::fs::read(path).expect("a file"))).collect()
}

#[test]
fn an_empty_file_becomes_a_store() {
    let folder = folder();
    let path = folder.path().join("a.db");
    std::fs::write(&path, "").expect("a file");
    tell(&path, "start w1      started");
}

/// A copy can be behind its original: its claims are void, and so it is told apart.
#[test]
fn a_file_copied_by_hand_raises_the_epoch() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let copy = |from: &str, to: &str| assert!(std::fs::copy(at(from), at(to)).is_ok());
    let gone = |name: &str| std::fs::remove_file(at(name)).expect("it was there");
    let epoch = |name: &str| open(&at(name)).expect("it opens").identity().epoch;
    tell(&at("a.db"), "start w1 claim=a    started w1@1:start");
    assert_eq!(epoch("a.db"), 1, "reopened");
    std::fs::rename(at("a.db"), at("moved.db")).expect("it moves");
    assert_eq!(epoch("moved.db"), 1, "moved");
    copy("moved.db", "copy.db");
    assert_eq!(epoch("copy.db"), 2, "copied");
    assert_eq!(epoch("copy.db"), 2, "once");
    // The file alone is the whole store while nobody owns it.
    tell(&at("copy.db"), "start w1    replay of 0s");
    // Put back in place of the original, which takes the number that the file system had given that.
    copy("moved.db", "kept.db");
    gone("moved.db");
    copy("kept.db", "moved.db");
    assert_eq!(epoch("moved.db"), 2, "put back");
}

#[test]
fn a_backup_beside_a_live_owner_is_whole_and_of_another_epoch() {
    let folder = folder();
    let path = folder.path().join("a.db");
    let mut diary = Diary::begin(Box::new(At(path.clone())));
    let written = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let copier = std::thread::spawn({
        let (written, stop, folder) = (written.clone(), stop.clone(), folder.path().to_path_buf());
        move || {
            let mut copies = Vec::new();
            while !stop.load(Ordering::SeqCst) || copies.is_empty() {
                let copy = folder.join(format!("backup{}.db", copies.len()));
                let before = written.load(Ordering::SeqCst);
                sqlite::backup(&folder.join("a.db"), &copy).expect("a backup is made");
                copies.push((copy, before));
            }
            copies
        }
    });
    for n in 0..300 {
        assert_eq!(diary.say(&format!("start w{n} $n={n} claim=a")), format!("started w{n}@1:start"));
        assert_eq!(diary.say(&format!("complete w{n}@1 to pay $n={}", n + 1)), "committed ready");
        written.fetch_add(1, Ordering::SeqCst);
    }
    stop.store(true, Ordering::SeqCst);
    let copies = copier.join().expect("backups are made");
    diary.tell("owner      boot 1 epoch 1");
    diary.end();
    for (copy, before) in [copies.first(), copies.get(copies.len() / 2), copies.last()].into_iter().flatten() {
        let store = open(copy).expect("a backup opens");
        assert_eq!((store.identity().epoch, store.identity().boot), (2, 2));
        let verified = store.reader().verify(&mut |_| {}).expect("it is read");
        assert_eq!(verified.faults, []);
        assert!(verified.workflows >= *before, "what was committed before the backup began is in it");
        drop(store);
        assert_eq!(open(copy).expect("it opens again").identity().epoch, 2, "raised once");
    }
    let error = sqlite::backup(&path, &copies[0].0).expect_err("nothing is overwritten");
    assert_eq!(error.code(), "store_unavailable");
    let nowhere = folder.path().join("nowhere.db");
    assert_eq!(sqlite::backup(&nowhere, &folder.path().join("x.db")).expect_err("no store").code(), "store_foreign");
    assert!(!folder.path().join("x.db").exists() && !nowhere.exists(), "and nothing is left behind");
}

#[test]
fn the_clock_goes_on_from_the_last_event() {
    let folder = folder();
    let path = folder.path().join("a.db");
    tell(
        &path,
        "
        start w1                      started
        at 1h
        cancel w1                     cancelled
        ",
    );
    let set_back = Arc::new(ManualClock::new(DAY_ONE - 86_400_000));
    let store = SqliteStore::open_with(&path, set_back, || Ok(SECRET)).expect("it opens");
    assert_eq!(store.clock().now(), DAY_ONE + 3_600_000);
}

/// A name space that came with a batch that was rolled back is not taken for one that is there.
#[test]
fn a_rolled_back_batch_leaves_no_namespace_behind() {
    let folder = folder();
    let path = folder.path().join("a.db");
    let store = open(&path).expect("it opens");
    let mut writer = store.writer().expect("it has one");
    let moment = Moment { now: DAY_ONE, epoch: 1 };
    let trigger = "create trigger full before insert on events begin select raise(abort, 'the disk is full'); end";
    raw(&path).execute_batch(trigger).expect("a trigger");
    let refused = apply(writer.as_mut(), &moment, &[start(key("blue", "w1"), "1", None)]);
    assert!(matches!(refused, Applied::NotCommitted(StoreError::Sqlite { .. })), "{refused:?}");
    raw(&path).execute_batch("drop trigger full").expect("it was there");
    let committed = apply(writer.as_mut(), &moment, &[start(key("blue", "w1"), "1", None)]);
    assert!(matches!(committed, Applied::Committed(_)), "{committed:?}");
    drop((writer, store));
    let store = open(&path).expect("it opens");
    assert!(store.reader().head(&key("blue", "w1")).expect("it is read").is_some());
    assert_eq!(store.reader().verify(&mut |_| {}).expect("it is read").faults, []);
}

// ---- damage ----

#[test]
fn verify_finds_planted_damage() {
    let folder = folder();
    let path = folder.path().join("a.db");
    tell(
        &path,
        "
        start ready $user=1           started
        start running claim=a         started running@1:start
        start done claim=a            started done@1:start
        at 1s
        complete done@1 to pay $n=1 next=a          committed running done@3:pay
        complete done@3 done 1        committed completed
        start failed claim=a          started failed@1:start
        fail failed@1 boom final      committed failed
        start slept claim=a           started slept@1:start
        complete slept@1 to pay after=1m            committed sleeping
        start waits claim=a           started waits@1:start
        signal waits other as=o       accepted
        signal waits paid as=p        accepted
        complete waits@1 wait paid ship next=a      committed running waits@4:ship
        complete waits@4 wait paid ship timeout=1m remind   committed waiting
        ",
    );
    let of =
        |id: &str, what: &str| what.replace("$", &format!("workflow = (select workflow from heads where id = '{id}')"));
    let damages = [
        (of("done", "update heads set seq = seq + 1 where $"), "head_differs"),
        (of("ready", "update heads set visit = 9 where $"), "head_differs"),
        (of("ready", "update heads set attempt = 2 where $"), "head_differs"),
        (of("ready", "update heads set rank = rank + 1 where $"), "head_differs"),
        (of("ready", "update heads set name = 'other' where $"), "head_differs"),
        (of("ready", "update heads set created_at = 1 where $"), "head_differs"),
        (of("ready", "update heads set options = null where $"), "head_differs"),
        (of("ready", "update heads set options = '{' where $"), "head_unreadable"),
        (of("running", "update heads set token = zeroblob(16) where $"), "head_differs"),
        (of("running", "update heads set token = zeroblob(15) where $"), "head_unreadable"),
        (of("running", "update heads set due = due + 100000 where $"), "head_differs"),
        (of("slept", "update heads set due = due + 1 where $"), "head_differs"),
        (of("slept", "update heads set status = 'backoff' where $"), "head_differs"),
        (of("slept", "update heads set wake = 0 where $"), "head_unreadable"),
        (of("failed", "update heads set code = 'bang' where $"), "head_differs"),
        (of("failed", "update heads set status = 'cancelled', code = null where $"), "head_differs"),
        (of("done", "delete from heads where $"), "log_without_head"),
        (of("done", "delete from events where $ and seq = 0"), "gap"),
        (of("done", "delete from events where $ and seq = 2"), "gap"),
        (of("done", "delete from events where $ and seq = 5"), "unfinished_commit"),
        (of("done", "delete from events where $"), "no_log"),
        (of("slept", "delete from events where $ and seq = 2"), "head_differs"),
        (of("done", "update events set at = at - 5000 where $ and seq = 3"), "time_runs_back"),
        (of("done", "update events set payload = '{}' where $ and seq = 1"), "event_unreadable"),
        (of("done", "update events set version = 2 where $ and seq = 1"), "event_unreadable"),
        (
            of(
                "done",
                "update events set payload = replace(payload, '\"attempt\":1', '\"attempt\":2') where $ and seq = 1",
            ),
            "illegal_event",
        ),
        (of("done", "update scratchpad set value = '8' where $ and key = 'n'"), "variable_differs"),
        (of("done", "update scratchpad set seq = 0 where $ and key = 'n'"), "variable_differs"),
        (of("done", "delete from scratchpad where $ and key = 'n'"), "variable_missing"),
        (of("done", "update scratchpad set key = 'm' where $ and key = 'n'"), "variable_unknown_to_log"),
        (of("waits", "update heads set wait = replace(wait, 'remind', 'other') where $"), "head_differs"),
        (of("waits", "update heads set wait = '{' where $"), "head_unreadable"),
        (of("waits", "update heads set due = due + 1 where $"), "head_unreadable"),
        (of("waits", "update signals set seq = null, payload = '1' where $ and id = 'p'"), "signal_missing"),
        (of("waits", "update signals set seq = 2 where $ and id = 'p'"), "signal_not_received"),
        (of("waits", "update signals set id = 'q' where $ and id = 'p'"), "signal_not_received"),
        (of("waits", "delete from signals where $ and id = 'p'"), "signal_missing"),
        (of("waits", "update signals set name = 'paid' where $ and id = 'o'"), "signal_not_taken"),
        (of("waits", "update scratchpad set value = '8' where $ and key = 'signal:paid'"), "variable_differs"),
        ("update signals set workflow = 99".to_owned(), "signal_without_head"),
        ("insert into scratchpad values (1, 99, 'x', '1', 0)".to_owned(), "variable_without_head"),
        ("insert into events values (1, 99, 1, 'workflow_created', 1, 1, '{}')".to_owned(), "log_without_beginning"),
        ("delete from admissions where id = 'done'".to_owned(), "head_without_receipt"),
        ("delete from namespaces where name = 'default'".to_owned(), "head_without_namespace"),
        ("update admissions set workflow = 99 where id = 'done'".to_owned(), "head_without_receipt"),
    ];
    let sound = SqliteReader::open(&path).expect("it opens").verify(&mut |_| {}).expect("it is read");
    assert_eq!((sound.workflows, sound.fault_count), (6, 0), "{:?}", sound.faults);
    for (n, (damage, code)) in damages.into_iter().enumerate() {
        let copy = folder.path().join(format!("{n}.db"));
        std::fs::copy(&path, &copy).expect("a copy");
        let changed = raw(&copy).execute(&damage, []).expect("it is sound");
        assert!(changed > 0, "{damage}");
        let verified = SqliteReader::open(&copy).expect("it opens").verify(&mut |_| {}).expect("it is read");
        let found: Vec<&str> = verified.faults.iter().map(|fault| fault.code).collect();
        assert!(found.contains(&code), "{damage}: {found:?} and not {code}");
        assert_eq!(verified.fault_count, found.len() as u64);
    }
}

#[test]
fn verify_finds_a_damaged_page() {
    let folder = folder();
    let path = folder.path().join("a.db");
    tell(&path, "start w1      started");
    let page: usize = raw(&path)
        .query_row("select rootpage from sqlite_schema where name = 'heads_by_name'", [], |row| row.get::<_, i64>(0))
        .map(|page| usize::try_from(page).expect("pages count from 1"))
        .expect("a page");
    let mut bytes = std::fs::read(&path).expect("a file");
    let begin = (page - 1) * 4096;
    bytes[begin..begin + 4096].fill(0);
    std::fs::write(&path, bytes).expect("a file");
    let verified = SqliteReader::open(&path).expect("it opens").verify(&mut |_| {}).expect("it is read");
    let found: Vec<&str> = verified.faults.iter().map(|fault| fault.code).collect();
    assert!(!found.is_empty() && found.iter().all(|code| *code == "database_damaged"), "{:?}", verified.faults);
    assert_eq!(verified.workflows, 1, "and what could be compared was");
}

/// One row that cannot be read is left alone, and nothing else waits for it.
#[test]
fn an_unreadable_head_does_not_hold_up_the_others() {
    let folder = folder();
    let path = folder.path().join("a.db");
    tell(
        &path,
        "
        start bad1                    started
        start bad2 claim=a            started bad2@1:start
        start w1                      started
        start w2 claim=b remote       started w2@1:start
        start w3 claim=b remote       started w3@1:start
        ",
    );
    raw(&path).execute("update heads set options = '{' where id like 'bad%'", []).expect("it is sound");
    let mut diary = Diary::begin(Box::new(At(path)));
    diary.tell(
        "
        claim a 2                     w1@1:start
        claim a 2                     -
        give_back limit=2             2 alive, more
        give_back limit=2 on          1 alive
        at 30s
        sweep limit=2                 2 leases lost, more
        sweep limit=2                 1 leases lost
        start bad1                    replay of 0s
        start w4                      started
        claim a 5                     w1@3:start delivery 2, w2@3:start delivery 2, w3@3:start delivery 2, w4@1:start
        ",
    );
}

// ---- cost ----

/// A workflow that goes from step to step, each in a commit of its own unless it is hurried.
struct Chain {
    path: PathBuf,
    store: SqliteStore,
    writer: Box<dyn Writer>,
    work: Arc<AtomicU64>,
    held: Held,
    calls: u64,
    now: i64,
}

impl Chain {
    fn start(path: &Path) -> Self {
        let work = Arc::new(AtomicU64::new(0));
        let store = Self::open(path, &work);
        let mut writer = store.writer().expect("it has one");
        let moment = Moment { now: DAY_ONE, epoch: 1 };
        let claim = Some(terms(0));
        let Applied::Committed(outcomes) = apply(writer.as_mut(), &moment, &[start(key("default", "w1"), "1", claim)])
        else {
            panic!("it is committed");
        };
        let Outcome::Start(admission::Outcome::Started { claimed: Some(granted) }) = &outcomes[0] else {
            panic!("it is claimed: {outcomes:?}");
        };
        Self { path: path.to_path_buf(), store, writer, work, held: granted.held.clone(), calls: 0, now: DAY_ONE }
    }

    fn open(path: &Path, work: &Arc<AtomicU64>) -> SqliteStore {
        SqliteStore::open_counted(path, Arc::new(ManualClock::new(DAY_ONE)), || Ok(SECRET), work.clone())
            .expect("it opens")
    }

    /// One step and the claim of the next.
    fn step(&mut self) {
        self.calls += 1;
        self.now += 1;
        let command = Command::Complete(Box::new(Complete {
            held: self.held.clone(),
            writes: [(Key::trusted("n"), Some(Json::parse(&self.calls.to_string()).expect("JSON")))]
                .into_iter()
                .collect(),
            continuation: Continuation::Step { step: Step::trusted("next"), when: When::Now },
            claim_next: Some(terms(self.calls)),
        }));
        let moment = Moment { now: self.now, epoch: 1 };
        let Applied::Committed(outcomes) = apply(self.writer.as_mut(), &moment, &[command]) else {
            panic!("it is committed");
        };
        let Outcome::Commit(commit::Outcome::Committed(after)) = &outcomes[0] else {
            panic!("it is committed: {outcomes:?}");
        };
        self.held = after.next.clone().expect("the next step is claimed").held;
    }

    /// Operations of the machine, and pages written, by so many steps.
    fn cost(&mut self, steps: u64) -> (u64, u64) {
        let side = raw(&self.path);
        let frames = || {
            let length = side.query_row("pragma wal_checkpoint(noop)", [], |row| row.get::<_, i64>(1));
            length.expect("the length of the log").unsigned_abs()
        };
        let (work, pages) = (self.work.load(Ordering::Relaxed), frames());
        (0..steps).for_each(|_| self.step());
        (self.work.load(Ordering::Relaxed) - work, frames() - pages)
    }

    /// What it costs to take the store over: to open it, give back what its dead worker held, and claim it.
    fn taken_over(self) -> u64 {
        let Self { path, store, writer, .. } = self;
        drop((writer, store));
        let work = Arc::new(AtomicU64::new(0));
        let store = Self::open(&path, &work);
        let mut writer = store.writer().expect("it has one");
        let moment = Moment { now: DAY_ONE + 3_600_000, epoch: 1 };
        let give_back = sweep::GiveBack {
            boots: sweep::Boots::only(2),
            orphaned: Vec::new(),
            after: None,
            limit: 10,
            deliveries_max: 20,
        };
        let claim = steadfast_core::claim::Request { terms: terms(u64::MAX), n: 1, id: None };
        let applied = apply(writer.as_mut(), &moment, &[Command::GiveBack(give_back)]);
        assert!(
            matches!(&applied, Applied::Committed(outcomes) if matches!(&outcomes[0], Outcome::Sweep(report) if report.given_back == 1))
        );
        let applied = apply(writer.as_mut(), &moment, &[Command::Claim(claim)]);
        assert!(
            matches!(&applied, Applied::Committed(outcomes) if matches!(&outcomes[0], Outcome::Claim(page) if page.granted.len() == 1))
        );
        work.load(Ordering::Relaxed)
    }
}

fn terms(call: u64) -> Terms {
    let mut seed = [1; 32];
    seed[..8].copy_from_slice(&call.to_be_bytes());
    Terms {
        worker: WorkerRef { label: "a".into(), boot: 1, remote: false },
        announced: Arc::new(Announced {
            namespace: Namespace::default_namespace(),
            definitions: [(Name::trusted("flow"), Steps::AllBut(Default::default()))].into(),
        }),
        lease_ms: 86_400_000,
        seed,
    }
}

/// The looks for work and for what is due, in a store full of what is over or asleep and in one without.
#[test]
fn what_is_over_or_asleep_costs_a_look_nothing() {
    let folder = folder();
    let cost = |name: &str, over: i64, asleep: i64| {
        let path = folder.path().join(name);
        drop(open(&path).expect("it opens"));
        let connection = raw(&path);
        connection.execute_batch("begin").expect("it begins");
        let mut last = 0;
        for (count, status, step, rank, due) in [
            (over, "completed", None, None, None),
            (asleep, "sleeping", Some("start"), None, Some(1_i64 << 50)),
            (64, "ready", Some("start"), Some(0), None),
        ] {
            let (held, wake) = (step.map(|_| 1), due.map(|_| 1));
            for number in last + 1..=last + count {
                connection
                    .prepare_cached(
                        "insert into heads (namespace, workflow, id, name, priority, created_at, updated_at, seq,
                             status, step, visit, attempt, delivery, rank, wake, due)
                         values (1, ?1, printf('w%d', ?1), 'flow', 0, 1, 1, 0, ?2, ?3, ?4, ?4, ?4, ?5, ?6, ?7)",
                    )
                    .and_then(|mut insert| {
                        insert.execute(rusqlite::params![number, status, step, held, rank, wake, due])
                    })
                    .expect("a row");
            }
            last += count;
        }
        connection.execute_batch("commit").expect("it commits");
        drop(connection);
        let work = Arc::new(AtomicU64::new(0));
        let store = Chain::open(&path, &work);
        let mut writer = store.writer().expect("it has one");
        let mut claim = Wants::default();
        claim.ready(&terms(0).announced, 64);
        let sweep = Wants { due: Some((DAY_ONE, 512)), ..Wants::default() };
        [claim, sweep].map(|wants| {
            let before = work.load(Ordering::Relaxed);
            writer.load(&wants, &mut Snapshot::new()).expect("it loads");
            writer.abandon();
            work.load(Ordering::Relaxed) - before
        })
    };
    let (full, empty) = (cost("full.db", 100_000, 10_000), cost("empty.db", 0, 0));
    for (look, (full, empty)) in ["claim", "sweep"].into_iter().zip(full.into_iter().zip(empty)) {
        assert!(
            full > 0 && (within_a_tenth(full, empty) || full.abs_diff(empty) <= 20),
            "operations of a {look}: {full} in a full store, {empty} in an empty one"
        );
    }
}

/// A store opened through a link has the log of the file itself, so that it is that one which is synced.
#[test]
fn a_store_behind_a_link_has_one_log_and_one_owner() {
    let folder = folder();
    let (path, link) = (folder.path().join("real/a.db"), folder.path().join("link.db"));
    std::fs::create_dir(folder.path().join("real")).expect("a folder");
    tell(&path, "start w1      started");
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    let owner = open(&link).expect("it opens");
    assert_eq!(owner.path(), path);
    assert_eq!(open(&path).expect_err("it is owned").code(), "store_owned");
    drop(owner);
    tell(&link, "start w1      replay of 0s");
    std::fs::remove_file(&path).expect("it was there");
    assert_eq!(open(&link).expect_err("it leads nowhere").code(), "store_foreign");
}

fn within_a_tenth(a: u64, b: u64) -> bool {
    a.abs_diff(b) * 10 <= a.max(b)
}

/// One workflow of 100,000 steps, each commit alone: the last ones cost what the first ones did, the write-ahead log
/// stays bounded all the way, and whoever takes the store over pays nothing for the history.
#[test]
fn history_costs_nothing() {
    const STEPS: u64 = 100_000;
    let folder = folder();
    let mut long = Chain::start(&folder.path().join("long.db"));
    (0..10).for_each(|_| long.step());
    let early = long.cost(100);
    let log = folder.path().join("long.db-wal");
    let mut log_max = 0;
    for step in 110..STEPS - 100 {
        long.step();
        if step % 100 == 0 {
            log_max = log_max.max(std::fs::metadata(&log).expect("a log").len());
        }
    }
    let late = long.cost(100);
    assert!(within_a_tenth(early.0, late.0), "operations of 100 steps: {} early, {} late", early.0, late.0);
    assert!(within_a_tenth(early.1, late.1), "pages of 100 steps: {} early, {} late", early.1, late.1);
    assert!(log_max > 16 << 20, "it was long enough to need a bound: {log_max}");
    assert!(log_max < 64 << 20, "the write-ahead log grew to {log_max} bytes");

    let mut short = Chain::start(&folder.path().join("short.db"));
    (0..4).for_each(|_| short.step());
    let (short, long) = (short.taken_over(), long.taken_over());
    assert!(within_a_tenth(short, long), "operations of taking over: {short} after 10 events, {long} after 200,000");
}
