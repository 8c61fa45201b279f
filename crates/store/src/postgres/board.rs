//! Boarding: how a process becomes one of the store's nodes, and how the others learn of its end.
//!
//! # Leases
//! A node is a row with a small number, held by lease and renewed from the background. A node whose lease is over counts
//! as gone: what its workers held is given back by one of the others, which marks the row while it does. A node that was
//! only slow finds its claims lost and goes on under the same boot; its fence has kept it from doing harm.
//! Who could not renew its own lease, or not for long, does not judge others by theirs: after an outage of the database
//! every lease is over, and nobody is gone.
//!
//! # Neighbours
//! On one machine a process that has ended is seen to have ended, and its lease is not waited for.
//!
//! # Epoch
//! The store's row says in which cluster and on which timeline it was last written. Whoever boards, or connects to write,
//! and finds himself elsewhere (a standby was promoted, a backup was restored) raises the epoch before anything else:
//! claims of the epoch before are void, whatever the lost part of its history says of them.

use std::fs;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::sweep::Boots;
use tokio_postgres::types::Type;

use super::place::Place;
use super::session::{Session, postgres};
use crate::contract::{Identity, StoreError};

/// How long a node counts as alive without a renewal, in milliseconds.
pub(super) const LEASE_MS: i64 = 15_000;
/// Nodes of one store.
const NODES_MAX: i32 = 1_024;
/// How long one node has the giving back for another to itself, in milliseconds.
const REAPING_MS: i64 = 10_000;
/// How long what a node wrote is remembered by batch after its end, in milliseconds.
const BATCHES_MS: i64 = 3_600_000;
/// How long whoever connects again waits to be told the epoch.
const COMING: Duration = Duration::from_secs(10);
/// The server's time in milliseconds since the epoch.
const NOW: &str = "(extract(epoch from clock_timestamp()) * 1000)::bigint";

/// A process as its machine knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    machine: String,
    pid: i64,
    born: i64,
}

impl Process {
    /// This process.
    pub(super) fn own() -> Self {
        let pid = i64::from(std::process::id());
        Self { machine: machine(), pid, born: Seen::of(pid).born().unwrap_or_default() }
    }

    /// True when this machine is the one where it ran, and it does not run any more.
    fn has_ended_here(&self) -> bool {
        self.machine == machine() && self.born != 0 && Seen::of(self.pid).is_other_than(self.born)
    }
}

/// What can be seen of a process by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// It runs, and began then, in the machine's own count.
    Born(i64),
    /// There is none, or it has ended and waits to be asked about.
    Over,
    /// There is one of which nothing can be read: the machine may hide processes of other users.
    Hidden,
}

impl Seen {
    fn of(pid: i64) -> Self {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Self::Hidden };
        Self::judge(fs::read_to_string(format!("/proc/{pid}/stat")).ok().as_deref(), || {
            test_kill_process(number) != Err(Errno::SRCH)
        })
    }

    /// By what the machine tells of it, if anything, and else by whether there is a process of that number.
    fn judge(stat: Option<&str>, is_there: impl Fn() -> bool) -> Self {
        // The name may hold anything; what follows its last parenthesis does not.
        let fields: Option<Vec<&str>> =
            stat.and_then(|stat| stat.rsplit_once(')')).map(|(_, fields)| fields.split_whitespace().collect());
        match fields {
            Some(fields) if matches!(fields.first(), Some(&("Z" | "X"))) => Self::Over,
            Some(fields) => fields.get(19).and_then(|born| born.parse().ok()).map_or(Self::Hidden, Self::Born),
            None if is_there() => Self::Hidden,
            None => Self::Over,
        }
    }

    fn born(self) -> Option<i64> {
        if let Self::Born(born) = self { Some(born) } else { None }
    }

    /// True when the process that began at `born` has certainly ended.
    fn is_other_than(self, born: i64) -> bool {
        match self {
            Self::Born(other) => other != born,
            Self::Over => true,
            Self::Hidden => false,
        }
    }
}

/// The boot of this machine and the space of its process numbers; containers on one machine do not see each other.
fn machine() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = fs::read_link("/proc/self/ns/pid").map(|link| link.display().to_string()).unwrap_or_default();
    if boot.is_empty() || space.is_empty() { String::new() } else { format!("{} {space}", boot.trim()) }
}

/// A node's place among the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Berth {
    pub node: i32,
    pub boot: i64,
}

/// Begins this process's boot: counts it, takes a node number by lease, and raises the epoch where it has to.
pub(super) async fn board(session: &Session, place: &Place) -> Result<(Identity, Berth), StoreError> {
    let doing = "begin a boot";
    // Another node that boards at the same time may take the same number; then all of it is done again.
    for _ in 0..20 {
        session.client.batch_execute("begin").await.map_err(postgres(doing))?;
        let rows = session
            .client
            .query_typed(
                &place.text(
                    "update {schema}.store set boot = boot + 1,
                         epoch = epoch + (copied or (system <> '' and (system <> $1 or timeline <> $2)))::int,
                         copied = false, system = $1, timeline = $2
                     returning epoch, boot, fingerprint_key",
                ),
                &[(&session.server.system, Type::TEXT), (&session.server.timeline, Type::INT8)],
            )
            .await
            .map_err(postgres(doing))?;
        let corrupt =
            |problem: &str| StoreError::Corrupt { what: "store row", key: "-".to_owned(), problem: problem.to_owned() };
        let row = rows.first().ok_or_else(|| corrupt("there is none"))?;
        let (epoch, boot): (i64, i64) = (row.get(0), row.get(1));
        let secret = row.get::<_, &[u8]>(2).try_into().map_err(|_| corrupt("its secret is not 32 bytes long"))?;
        let node = take_number(session, place, boot).await?;
        session.client.batch_execute("commit").await.map_err(postgres(doing))?;
        if let Some(node) = node {
            let identity = Identity {
                epoch: epoch.unsigned_abs(),
                boot: boot.unsigned_abs(),
                fingerprint_key: FingerprintKey(secret),
            };
            return Ok((identity, Berth { node, boot }));
        }
    }
    let problem = format!("{NODES_MAX} nodes have it open; stop some, or wait until their leases are over");
    Err(StoreError::Place { problem })
}

/// Takes the smallest free node number; `None` when somebody else took it first.
async fn take_number(session: &Session, place: &Place, boot: i64) -> Result<Option<i32>, StoreError> {
    let Process { machine, pid, born } = Process::own();
    let label = format!("{}:{pid}", host());
    let rows = session
        .client
        .query_typed(
            &place.text(&format!(
                "insert into {{schema}}.nodes (node, boot, label, machine, pid, born, started_at, expires_at)
                 select n, $1, $2, $3, $4, $5, {NOW}, {NOW} + {LEASE_MS} from generate_series(1, {NODES_MAX}) n
                 where not exists (select from {{schema}}.nodes o where o.node = n) order by n limit 1
                 on conflict do nothing returning node"
            )),
            &[
                (&boot, Type::INT8),
                (&label, Type::TEXT),
                (&machine, Type::TEXT),
                (&pid, Type::INT8),
                (&born, Type::INT8),
            ],
        )
        .await
        .map_err(postgres("take a node number"))?;
    Ok(rows.first().map(|row| row.get(0)))
}

fn host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "host".to_owned(), |name| name.trim().to_owned())
}

/// Renews the lease, under a new number if the old one was given away meanwhile.
pub(super) async fn renew(session: &Session, place: &Place, berth: Berth) -> Result<Berth, StoreError> {
    let Berth { node, boot } = berth;
    let renewed = session
        .client
        .query_typed(
            &place.text(&format!(
                "update {{schema}}.nodes set expires_at = {NOW} + {LEASE_MS} where node = $1 and boot = $2 returning node"
            )),
            &[(&node, Type::INT4), (&boot, Type::INT8)],
        )
        .await
        .map_err(postgres("renew a node's lease"))?;
    if !renewed.is_empty() {
        return Ok(berth);
    }
    tracing::warn!(node, "this node counted as gone; it takes a new number");
    match take_number(session, place, boot).await? {
        Some(node) => Ok(Berth { node, boot }),
        // Tried again at the next renewal.
        None => Ok(berth),
    }
}

/// Who else is on board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Company {
    /// Nobody, and nobody who may be gone.
    pub alone: bool,
    /// Nobody who lives began earlier.
    pub first: bool,
}

pub(super) async fn company(session: &Session, place: &Place, berth: Berth) -> Result<Company, StoreError> {
    let text = format!(
        "select count(*) filter (where boot <> $1) = 0,
                count(*) filter (where boot < $1 and expires_at >= {NOW}) = 0
         from {{schema}}.nodes"
    );
    let rows = session
        .client
        .query_typed(&place.text(&text), &[(&berth.boot, Type::INT8)])
        .await
        .map_err(postgres("look for other nodes"))?;
    let company = rows.first().map(|row| Company { alone: row.get(0), first: row.get(1) });
    Ok(company.expect("a count is one row"))
}

/// Gives the number back.
pub(super) async fn leave(session: &Session, place: &Place, berth: Berth) -> Result<(), StoreError> {
    session
        .client
        .query_typed(
            &place.text("delete from {schema}.nodes where node = $1 and boot = $2"),
            &[(&berth.node, Type::INT4), (&berth.boot, Type::INT8)],
        )
        .await
        .map_err(postgres("give a node number back"))?;
    session
        .client
        .query_typed(&place.text("delete from {schema}.batches where boot = $1"), &[(&berth.boot, Type::INT8)])
        .await
        .map(drop)
        .map_err(postgres("forget this node's batches"))
}

/// Reads a process from the three columns that begin at 3.
fn process(row: &tokio_postgres::Row) -> Process {
    Process { machine: row.get(3), pid: row.get(4), born: row.get(5) }
}

/// Reads which nodes live, by their leases as they stand.
pub(super) async fn boots(session: &Session, place: &Place) -> Result<Boots, StoreError> {
    boots_seen_by(session, place, None, || true).await
}

/// Reads which nodes live; the one that asks, of the boot `own`, does. Of the others a lease that is over counts when
/// `judges` says so once they are read, or when somebody looks after that node already.
pub(super) async fn boots_seen_by(
    session: &Session,
    place: &Place,
    own: Option<i64>,
    judges: impl Fn() -> bool,
) -> Result<Boots, StoreError> {
    let rows = session
        .client
        .query_typed(
            &place.text(&format!(
                "select s.boot, n.boot, n.expires_at >= {NOW}, n.machine, n.pid, n.born, n.reaped_until >= {NOW}
                 from {{schema}}.store s left join {{schema}}.nodes n on true"
            )),
            &[],
        )
        .await
        .map_err(postgres("look for the nodes"))?;
    let judges = judges();
    let mut boots = Boots { until: 0, alive: own.map(i64::unsigned_abs).into_iter().collect() };
    for row in &rows {
        boots.until = row.get::<_, i64>(0).unsigned_abs();
        let Some(boot) = row.get::<_, Option<i64>>(1) else { continue };
        let (holds, looked_after): (bool, bool) = (row.get(2), row.get(6));
        if (holds || !judges && !looked_after) && !process(row).has_ended_here() {
            boots.alive.insert(boot.unsigned_abs());
        }
    }
    Ok(boots)
}

/// Marks one node that is gone, other than this one of the boot `own`, as being looked after by this one, and answers its
/// boot. Unless `judges` says so once the leases are read, only what is seen to have ended on this machine counts.
pub(super) async fn next_gone(
    session: &Session,
    place: &Place,
    own: i64,
    judges: impl Fn() -> bool,
) -> Result<Option<u64>, StoreError> {
    let doing = "look for nodes that are gone";
    let rows = session
        .client
        .query_typed(
            &place.text(&format!(
                "select node, boot, expires_at < {NOW}, machine, pid, born from {{schema}}.nodes
                 where reaped_until < {NOW} and boot <> $1 order by node"
            )),
            &[(&own, Type::INT8)],
        )
        .await
        .map_err(postgres(doing))?;
    // After the look: a server that stood still answers it with leases that ended meanwhile.
    let judges = judges();
    for row in &rows {
        let has_ended = process(row).has_ended_here();
        let gone = has_ended || judges && row.get::<_, bool>(2);
        if !gone {
            continue;
        }
        let (node, boot): (i32, i64) = (row.get(0), row.get(1));
        let marked = session
            .client
            .query_typed(
                &place.text(&format!(
                    "update {{schema}}.nodes set reaped_until = {NOW} + {REAPING_MS}, expires_at = least(expires_at, {NOW} - 1)
                     where node = $1 and boot = $2 and reaped_until < {NOW} and ($3 or expires_at < {NOW})
                     returning node"
                )),
                &[(&node, Type::INT4), (&boot, Type::INT8), (&has_ended, Type::BOOL)],
            )
            .await
            .map_err(postgres(doing))?;
        if !marked.is_empty() {
            return Ok(Some(boot.unsigned_abs()));
        }
    }
    Ok(None)
}

/// Takes the row of a node away after everything it held was given back. While it still holds something, because its row
/// was locked when the others were given back, the node stays and is gone again when this one's time with it is over.
pub(super) async fn bury(session: &Session, place: &Place, boot: u64) -> Result<(), StoreError> {
    let boot = i64::try_from(boot).unwrap_or(i64::MAX);
    session
        .client
        .query_typed(
            // By the rows of what is due, as giving back finds them.
            &place.text(&format!(
                "delete from {{schema}}.nodes n where n.boot = $1 and n.expires_at < {NOW} and not exists (
                     select from {{schema}}.timed t cross join lateral (
                         select h.boot, h.remote from {{schema}}.heads h where h.workflow = t.workflow limit 1) h
                     where t.namespace in (select s.namespace from {{schema}}.namespaces s) and t.wake = 0
                         and h.boot = $1 and h.remote is not true)"
            )),
            &[(&boot, Type::INT8)],
        )
        .await
        .map_err(postgres("take the row of a node away"))?;
    // What a writer may still ask for is younger.
    session
        .client
        .query_typed(
            &place.text(&format!(
                "delete from {{schema}}.batches b where b.at < {NOW} - {BATCHES_MS}
                     and b.boot not in (select n.boot from {{schema}}.nodes n)"
            )),
            &[],
        )
        .await
        .map(drop)
        .map_err(postgres("forget the batches of nodes that are gone"))
}

/// Raises the epoch when this connection leads elsewhere than the last writer's, and answers the present one.
pub(super) async fn come_again(session: &Session, place: &Place) -> Result<u64, StoreError> {
    match tokio::time::timeout(COMING, compare_epochs(session, place)).await {
        Ok(epoch) => epoch,
        Err(_) => Err(StoreError::NoServer { tried: format!("no answer within {} s", COMING.as_secs()) }),
    }
}

async fn compare_epochs(session: &Session, place: &Place) -> Result<u64, StoreError> {
    let rows = session
        .client
        .query_typed(
            &place.text(
                "with raised as (
                     update {schema}.store set epoch = epoch + 1, system = $1, timeline = $2, copied = false
                     where copied or system <> $1 or timeline <> $2 returning epoch)
                 select coalesce((select epoch from raised), (select epoch from {schema}.store))",
            ),
            &[(&session.server.system, Type::TEXT), (&session.server.timeline, Type::INT8)],
        )
        .await
        .map_err(postgres("compare the timeline"))?;
    let epoch: Option<i64> = rows.first().and_then(|row| row.get(0));
    epoch.map(i64::unsigned_abs).ok_or_else(|| StoreError::Corrupt {
        what: "store row",
        key: "-".to_owned(),
        problem: "there is none".to_owned(),
    })
}

/// Says that this is a restored copy: whoever opens it next raises the epoch. While nodes live on it, it is not: they
/// would go on in the old epoch until one of them connects again.
pub(super) async fn mark_restored(session: &Session, place: &Place) -> Result<(), StoreError> {
    let failed = || postgres("mark the store as restored");
    session.begin().await.map_err(failed())?;
    // Its lock first: who boards meanwhile waits for it.
    let text = place.text("update {schema}.store set copied = true");
    session.client.batch_execute(&text).await.map_err(failed())?;
    let nodes = boots(session, place).await?.alive.len();
    if nodes > 0 {
        session.client.batch_execute("rollback").await.map_err(failed())?;
        return Err(StoreError::InUse { place: place.to_string(), nodes });
    }
    session.client.batch_execute("commit").await.map_err(failed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_is_seen_to_have_ended() {
        let own = Process::own();
        assert!(!own.has_ended_here());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep starts");
        let pid = i64::from(child.id());
        let other = Process { machine: machine(), pid, born: Seen::of(pid).born().expect("it runs") };
        assert!(!other.has_ended_here());
        child.kill().expect("it is killed");
        child.wait().expect("it is waited for");
        assert!(other.has_ended_here());
        assert!(Process { born: own.born + 1, ..own }.has_ended_here(), "a number that was given again");
        assert!(!Process { machine: "elsewhere".to_owned(), ..other }.has_ended_here());
    }

    /// With processes of other users hidden, as `hidepid` does, each node took the other for dead.
    #[test]
    fn a_process_that_cannot_be_seen_has_not_ended() {
        let stat =
            |state: &str, born: &str| format!("7 (a) b) {state} 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {born} 9 9");
        for (told, is_there, seen, has_ended) in [
            (Some(stat("S", "5")), true, Seen::Born(5), false),
            (Some(stat("S", "6")), true, Seen::Born(6), true),
            (Some(stat("Z", "5")), true, Seen::Over, true),
            (Some("7 (cut".to_owned()), true, Seen::Hidden, false),
            (None, true, Seen::Hidden, false),
            (None, false, Seen::Over, true),
        ] {
            let judged = Seen::judge(told.as_deref(), || is_there);
            assert_eq!((judged, judged.is_other_than(5)), (seen, has_ended), "{told:?} {is_there}");
        }
    }
}
