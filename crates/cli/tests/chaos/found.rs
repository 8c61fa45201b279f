//! Found: what is in the store, read with statements of our own and none of the product's.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use steadfast_pgtest::psql;

/// All rows that count, of one instant.
#[derive(Debug, Default)]
pub struct Found {
    /// Numbers of workflows by the id of their receipt.
    pub receipts: BTreeMap<String, Vec<i64>>,
    pub heads: BTreeMap<String, Vec<Head>>,
    /// Logs by number, in order of seq.
    pub logs: BTreeMap<i64, Vec<Event>>,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Head {
    pub id: String,
    pub workflow: i64,
    pub status: String,
    pub code: Option<String>,
    pub seq: i64,
}

#[derive(Debug, Clone, Deserialize)]
pub struct Event {
    workflow: i64,
    pub seq: i64,
    pub kind: String,
    pub payload: Value,
}

#[derive(Deserialize)]
struct Receipt {
    id: String,
    workflow: i64,
}

/// One row a line, and each says of what table it is.
const READ: &str = "
    select 'r ' || json_build_object('id', id, 'workflow', workflow) from steadfast.admissions;
    select 'h ' || json_build_object('id', id, 'workflow', workflow, 'status', status, 'code', code, 'seq', seq)
    from steadfast.heads;
    select 'e ' || json_build_object('workflow', workflow, 'seq', seq, 'kind', type, 'payload', payload::json)
    from steadfast.events order by namespace, workflow, seq;
";

/// The kinds of event that end a workflow.
pub const ENDS: [&str; 3] = ["workflow_completed", "workflow_failed", "workflow_cancelled"];

impl Found {
    pub fn read(url: &str) -> Self {
        Self::read_after(url, "")
    }

    /// Reads what would be there after these statements, which are undone.
    pub fn read_after(url: &str, statements: &str) -> Self {
        let text = format!("begin isolation level repeatable read;\n{statements};\n{READ}\nrollback;");
        let rows = psql(url, &text).unwrap_or_else(|error| panic!("read the store: {error}"));
        let mut found = Self::default();
        for row in rows.lines() {
            let (of, json) = row.split_at(2);
            // A row that does not read is one that nobody may have written.
            let bad = |error| panic!("{row}: {error}");
            match of {
                "r " => {
                    let Receipt { id, workflow } = serde_json::from_str(json).unwrap_or_else(bad);
                    found.receipts.entry(id).or_default().push(workflow);
                }
                "h " => {
                    let head: Head = serde_json::from_str(json).unwrap_or_else(|error| panic!("{row}: {error}"));
                    found.heads.entry(head.id.clone()).or_default().push(head);
                }
                "e " => {
                    let event: Event = serde_json::from_str(json).unwrap_or_else(|error| panic!("{row}: {error}"));
                    found.logs.entry(event.workflow).or_default().push(event);
                }
                _ => panic!("{row}: nobody asked for this"),
            }
        }
        found
    }

    pub fn head(&self, id: &str) -> Option<&Head> {
        self.heads.get(id)?.first()
    }

    pub fn log(&self, workflow: i64) -> &[Event] {
        self.logs.get(&workflow).map_or(&[], Vec::as_slice)
    }

    pub fn events(&self) -> usize {
        self.logs.values().map(Vec::len).sum()
    }
}

/// How many workflows have not ended, whoever asked for them.
pub fn live(url: &str) -> Result<usize, String> {
    let text = "select count(*) from steadfast.heads where status not in ('completed', 'failed', 'cancelled')";
    Ok(psql(url, text)?.parse().expect("a count is a number"))
}

/// When workflows ended, in order, in milliseconds since the epoch.
pub fn ends(url: &str) -> Vec<i64> {
    let kinds = ENDS.map(|kind| format!("'{kind}'")).join(", ");
    let text = format!("select at from steadfast.events where type in ({kinds}) order by at");
    let rows = psql(url, &text).unwrap_or_else(|error| panic!("read the store: {error}"));
    rows.lines().map(|row| row.parse().expect("a time is a number")).collect()
}

/// The epoch of the store.
pub fn epoch(url: &str) -> u64 {
    let row = psql(url, "select epoch from steadfast.store").unwrap_or_else(|error| panic!("read the store: {error}"));
    row.parse().expect("an epoch is a number")
}
