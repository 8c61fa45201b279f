//! Every scenario of the conformance suite, on every store.

mod harness;

mod grown {
    steadfast_store::conformance_tests!(crate::harness::Grown::default());
}

mod memory {
    steadfast_store::conformance_tests!(crate::harness::Memory::default());
}

mod partitioned {
    steadfast_store::conformance_tests!(crate::harness::Partitioned::default());
}

mod postgres {
    steadfast_store::conformance_tests!(crate::harness::Postgres::default());
}

mod sqlite {
    steadfast_store::conformance_tests!(crate::harness::Sqlite::default());
}
