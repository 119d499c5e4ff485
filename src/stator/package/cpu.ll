; Where a program for the CPU runs: there is one device, and no stream.

@device_type = internal constant i32 0
@other_device_text = text "the library is for the CPU, and no other device"

define internal i32 @device_named(ptr %text, ptr %number_at) {
  store i32 0, ptr %number_at
  %differs = call i32 @strncmp(ptr %text, ptr @cpu_text, i64 3)
  %is_cpu = icmp eq i32 %differs, 0
  br i1 %is_cpu, label %good, label %other
good:
  ret i32 0
other:
  %said = call i32 @say_of(ptr %text, ptr @other_device_text)
  ret i32 %said
}

define internal i32 @settle_device(i32 %asked, ptr %device_at) {
  store i32 0, ptr %device_at
  ret i32 0
}

define internal i32 @enter_stream(ptr %stream, i32 %device, ptr %guard_at) {
  ret i32 0
}

define internal void @leave_stream(ptr %guard_at) {
  ret void
}
